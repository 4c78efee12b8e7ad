"""The training loop: data → model → loss → engine → optimizers, and what happens between steps."""

import time
from signal import Signals

import torch
from torch import Tensor

from lipnext_scale.certify.radius import nominal_radii
from lipnext_scale.config import ConfigError
from lipnext_scale.data import Batch, DataSets, StreamLoader
from lipnext_scale.data.bad_samples import BadSamples
from lipnext_scale.data.workers import lost_a_worker
from lipnext_scale.data_check import require_same_samples, require_whole_shards
from lipnext_scale.errors import RunFailed, Stopped, UserError
from lipnext_scale.losses import class_distances, compute_loss, training_radius
from lipnext_scale.metrics import Metrics
from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import Optimizers, local_part
from lipnext_scale.parallel import build_engine, lost_a_peer
from lipnext_scale.parallel.measuring import StepMeasurement
from lipnext_scale.progress import Progress
from lipnext_scale.recipe import Recipe
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.run_state import RunState
from lipnext_scale.stopping import StopWish, stop_wishes


class Trainer:
    """A run: built from a recipe, continued from its newest checkpoint, trained to the end."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        torch.manual_seed(recipe.run.seed)  # nothing draws from it yet, and nothing may differ
        model = recipe.model
        self.data = DataSets(recipe.data, model.image_size, model.in_channels, model.num_classes)
        self.engine = build_engine(recipe.parallel, recipe.run.device)
        self.processes = self.engine.processes
        self.directory = RunDirectory(recipe.run.dir)
        self.loader = self._build_loader()
        self.bad_samples = BadSamples(
            recipe.data.bad_sample_limit, self.directory.bad_samples, writes=self.is_first
        )
        self.processes.first_does(lambda: self.directory.require_free_or_same(recipe))
        checked = self._check_shards()
        self.model = self._build_model()
        self.optimizers = Optimizers(self.model, recipe.optim, self.engine.manifold_optimizer)
        self.state = RunState(
            self.directory.checkpoints, recipe.run, self.engine, self.model, self.optimizers
        )
        self.wish = StopWish()
        self.stop_signal: Signals | None = None
        self.step = self.started_at = self.state.resume(self.loader)
        self.processes.first_does(lambda: self.directory.open_for(recipe, checked))
        if self.step and self.is_first:
            print(f"continuing {self.directory.path} from step {self.step}")

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks and writes for all."""
        return self.processes.rank == 0

    def _build_loader(self) -> StreamLoader:
        self.recipe.require_batch_for(self.processes.world_size)
        require_same_samples(self.data.all, self.processes)
        rank, world_size = self.processes.rank, self.processes.world_size
        pin_memory = self.processes.device.type == "cuda"
        return self.data.training_loader(self.recipe.run.seed, rank, world_size, pin_memory)

    def _check_shards(self) -> list[str]:
        """What is known of the shards after looking at those that have not been looked at."""
        if not self.recipe.data.verify:
            return []
        known = self.directory.whole_files()
        return require_whole_shards(self.data.all, self.processes, known)

    def _build_model(self) -> LipNeXt:
        """The model on its processes, with its initial weights."""
        config = self.recipe.model
        try:
            return self.engine.build(config, self.recipe.run.seed)
        except RuntimeError as error:
            said = ("can't allocate memory", "out of memory", "overflow")
            if not any(words in str(error) for words in said):
                raise
            gigabytes = 4 * config.bank_parameters / 1e9
            right = (
                f"with depth {config.depth} the matrices alone take {gigabytes:.3g} GB: too much "
                f"for {self.processes.world_size} process(es) with {self.engine.describe()}"
            )
            raise ConfigError("model.width", config.width, right) from error

    @property
    def total_steps(self) -> int:
        """The steps of the whole schedule."""
        return self.recipe.optim.epochs * self.loader.steps_per_epoch

    @property
    def last_step(self) -> int:
        """Where this process stops."""
        return min(self.total_steps, self.recipe.run.max_steps or self.total_steps)

    def run(self) -> None:
        run = self.recipe.run
        if self.step >= self.last_step:
            self._say(f"{run.dir}: already at step {self.step} of {self.last_step}: nothing to do")
            return
        metrics = self._open_metrics()
        self._say(self._introduction())
        progress = Progress(self.last_step, self.step, title="train", silent=not self.is_first)
        try:
            with stop_wishes() as self.wish, self.state.finishing():
                self._loop(metrics, progress)
        except BrokenPipeError:  # of whoever reads our output: not the run's
            raise
        except OSError as error:
            where = error.filename or run.dir
            raise RunFailed(f"step {self.step}: {where}: {error.strerror}") from None
        except RuntimeError as error:
            if lost_a_worker(error):
                raise RunFailed(
                    f"step {self.step}: a process that makes batches (data.workers) has ended: was "
                    f"it killed for lack of memory?; the same command continues {run.dir}"
                ) from None
            if not lost_a_peer(error):
                raise
            raise RunFailed(
                f"step {self.step}: another process has ended; the same command continues {run.dir}"
            ) from None
        finally:
            progress.close()
            if metrics is not None:
                metrics.close()
        self._say(f"{run.dir}: at step {self.step} of {self.total_steps}")

    def close(self) -> None:
        """Leave the other processes."""
        self.processes.close()

    def _open_metrics(self) -> Metrics | None:
        """The first rank's; the others have none."""

        def open_on_first() -> None:
            try:
                opened.append(
                    Metrics(self.directory.metrics, self.directory.tensorboard, self.step)
                )
            except OSError as error:
                raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None

        opened: list[Metrics] = []
        self.processes.first_does(open_on_first)
        return opened[0] if opened else None

    def _say(self, line: str) -> None:
        if self.is_first:
            print(line, flush=True)

    def _introduction(self) -> str:
        model, count = self.recipe.model, self.processes.world_size
        others = sum(p.numel() for p in self.model.parameters()) - model.bank_parameters
        places = f"{count} × {self.processes.device.type}" if count > 1 else self.processes.device
        return (
            f"LipNeXt L{model.depth}W{model.width} ({model.parametrisation}): "
            f"{model.bank_parameters:,} orthogonal and {others:,} other parameters on "
            f"{places} ({self.engine.describe()}), {self.total_steps} steps, "
            f"into {self.recipe.run.dir}"
        )

    def _loop(self, metrics: Metrics | None, progress: Progress) -> None:
        run = self.recipe.run
        clock, timed_from = time.perf_counter(), self.step
        for batch in self.loader:
            with StepMeasurement(self.engine, self.optimizers, self._measure_now()) as measured:
                values = self.train_step(batch)
            progress.advance()
            done = self.step == self.last_step
            due = self.step % run.log_every == 0 or self.step == self.total_steps
            if due or done:
                rate = (self.step - timed_from) / (time.perf_counter() - clock)
                clock, timed_from = time.perf_counter(), self.step
                told = {name: float(value) for name, value in values.items()}
                told["images_per_second"] = rate * self.recipe.data.batch_size
                told |= self.loader.stats.take()
                self._tell_bad_samples(told, progress)
                if due and metrics is not None:  # a stop in between leaves no trace in the metrics
                    metrics.write(self.step, told)
                progress.say(self._line(batch, told))
            if measured.values and metrics is not None:
                metrics.write(self.step, measured.values)
            if batch.last_of_epoch and self._evaluation_is_due(batch.epoch):
                scores = self.evaluate()
                if metrics is not None:
                    metrics.write(self.step, scores)
                progress.say("  " + "  ".join(f"{k} {v:.4f}" for k, v in scores.items()))
            self._save_or_stop(done, progress)
            if done:
                return

    def _tell_bad_samples(self, told: dict[str, float], progress: Progress) -> None:
        """Name those of all ranks that had to be replaced since the last time."""
        if self.recipe.data.on_bad_sample != "substitute":
            return
        reports = self.processes.gather_objects(self.loader.stats.take_bad())
        for line in self.bad_samples.add([bad for of_rank in reports for bad in of_rank]):
            progress.say(line)
        told["data/bad_samples"] = len(self.bad_samples)

    def _measure_now(self) -> bool:
        every, done = self.recipe.run.measure_every, self.step - self.started_at
        # The first steps of a process also make buffers and, with DDP, settle their order.
        return bool(every) and (done == 2 or (self.step + 1) % every == 0)

    def _save_or_stop(self, done: bool, progress: Progress) -> None:
        run, signal = self.recipe.run, self.stop_signal
        regular = run.checkpoint_every and self.step % run.checkpoint_every == 0
        if done or regular or signal:
            self.save()
        if signal and not done:
            self._tell_bad_samples({}, progress)
            self.state.wait()
            told_by = f"{signal.name} at step {self.step}: saved"
            raise Stopped(signal, f"{told_by}; the same command continues {run.dir}")

    def train_step(self, batch: Batch) -> dict[str, float | Tensor]:
        """One optimizer step on one batch; after an epoch's last one, the polar retraction."""
        optim, steps = self.recipe.optim, self.loader.steps_per_epoch
        lr = self.optimizers.set_learning_rate(
            self.step, self.total_steps, round(optim.warmup_epochs * steps)
        )
        epsilon = training_radius(self.recipe.loss, self.step / steps, optim.epochs)
        images = to_unit_range(batch.images, self.processes.device)
        labels = batch.labels.to(self.processes.device)

        self.optimizers.zero_grad()
        loss, accuracy = self._gradients(images, labels, epsilon)
        norm = self.engine.gradient_norm()
        loss, accuracy = self._over_all_ranks(loss, accuracy)
        self._require_finite(loss, norm)
        self.engine.clip_gradients(optim.clip_norm, norm)
        self._update()
        self.step += 1
        if batch.last_of_epoch:
            self.optimizers.retract()
        return {
            "train/loss": loss,
            "train/accuracy": accuracy,
            "train/gradient_norm": norm,
            "train/lr": lr,
            "train/epsilon": epsilon,
        }

    def _gradients(self, images: Tensor, labels: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Forward and backward passes, part by part; this rank's mean loss and accuracy."""
        parts = self.recipe.parallel.accumulation
        losses, hits = [], []
        for index, (x, y) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True)):
            logits, weight = self.engine.forward(x, last=index + 1 == parts)
            loss = compute_loss(self.recipe.loss, logits, y, class_distances(weight), epsilon)
            self.engine.backward(loss / parts)
            losses.append(loss.detach())
            hits.append((logits.detach().argmax(1) == y).float().mean())
        return torch.stack(losses).mean(), torch.stack(hits).mean()

    def _over_all_ranks(self, loss: Tensor, accuracy: Tensor) -> tuple[Tensor, Tensor]:
        """Their means over ranks, and the wish to stop if any rank has one: all act on it alike."""
        wish = torch.full_like(loss, self.wish.signal or 0)
        told = self.processes.gather(torch.stack([loss, accuracy, wish]))
        number = int(told[:, 2].max())
        self.stop_signal = Signals(number) if number else None
        return told[:, 0].mean(), told[:, 1].mean()

    def _update(self) -> None:
        try:
            self.optimizers.step()
        except FloatingPointError as error:
            raise RunFailed(
                f"step {self.step + 1}: {error}; lower optim.lr; the last checkpoint is whole"
            ) from None

    def _require_finite(self, loss: Tensor, norm: Tensor) -> None:
        """Stop before the update, naming the step and the first tensor that is not finite."""
        if bool(torch.isfinite(loss + norm)):  # one look at the device for both
            return
        where = f"step {self.step + 1}"
        if not torch.isfinite(loss):
            raise RunFailed(f"{where}: the loss is {loss.item()}; the weights were not updated")
        bad = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and not local_part(parameter.grad).isfinite().all()
        ]
        anywhere = {name for names in self.processes.gather_objects(bad) for name in names}
        for name, _ in self.model.named_parameters():
            if name in anywhere:
                raise RunFailed(
                    f"{where}: the gradient of {name} is not finite; the weights were not updated"
                )
        raise RunFailed(
            f"{where}: the gradient norm is {norm.item()}; the weights were not updated"
        )

    def evaluate(self) -> dict[str, float]:
        """Clean and certified accuracy of the slow weights on the test set, taking K as 1.

        A quick look while training; the certificate itself comes from lipnext_scale.certify, which
        bounds K from the stored weights.
        """
        test = self.data.test_set(self.processes.rank, self.processes.world_size)
        counts = torch.zeros(2, dtype=torch.float64)
        with self.optimizers.slow_weights(), torch.no_grad():
            for batch in test:
                images = to_unit_range(batch.images, self.processes.device)
                labels, radii = nominal_radii(*self.engine.forward(images))
                correct = (labels.cpu() == batch.labels) & batch.counted
                certified = correct & (radii.cpu() >= self.recipe.loss.epsilon)
                counts += torch.stack([correct.sum(), certified.sum()])
            self.engine.weights_changed()
        clean, cra = self.processes.gather(counts.to(self.processes.device)).sum(0).tolist()
        samples = len(self.data.test)
        return {"test/clean_accuracy": clean / samples, "test/nominal_cra": cra / samples}

    def _evaluation_is_due(self, epoch: int) -> bool:
        every = self.recipe.run.eval_every
        return bool(every) and ((epoch + 1) % every == 0 or epoch + 1 == self.recipe.optim.epochs)

    def _line(self, batch: Batch, told: dict[str, float]) -> str:
        return (
            f"epoch {batch.epoch + 1}/{self.recipe.optim.epochs}"
            f"  step {self.step}/{self.total_steps}"
            f"  loss {told['train/loss']:.4f}  accuracy {told['train/accuracy']:.3f}"
            f"  lr {told['train/lr']:.2e}  ε {told['train/epsilon']:.3f}"
            f"  {told['images_per_second']:.0f} images/s"
        )

    def save(self) -> None:
        self.state.save(self.step, self.loader)


def to_unit_range(images: Tensor, device: torch.device) -> Tensor:
    """uint8 → float32 in [0, 1], converted on the device."""
    return images.to(device, non_blocking=True).float().div_(255)
