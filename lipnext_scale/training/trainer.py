"""The training loop: data → model → loss → engine → optimizers, and what happens between steps."""

import time
from contextlib import AbstractContextManager
from signal import Signals, raise_signal

import torch
from torch import Tensor

from lipnext_scale.checkpoint import latest_checkpoint
from lipnext_scale.config.recipe import Recipe
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import Batch, DataSets, to_unit_range
from lipnext_scale.data.loader import BadSamples, lost_a_worker
from lipnext_scale.distributed import build_engine, is_out_of_memory, lost_a_peer
from lipnext_scale.losses import class_distances, compute_loss, training_radius
from lipnext_scale.models import LipNeXt
from lipnext_scale.observe import Observer
from lipnext_scale.observe.profile import require_reachable_window
from lipnext_scale.training.checkpointer import Checkpointer
from lipnext_scale.training.non_finite import NonFinitePolicy, what_is_not_finite
from lipnext_scale.training.preflight import require_intact_shards, require_same_samples
from lipnext_scale.training.signals import StopRequest, stop_requests
from lipnext_scale.training.watchdog import clear_empty_reports, collective_timeout, watching
from lipnext_scale.utils.config import ConfigError
from lipnext_scale.utils.errors import RunFailed, Stopped
from lipnext_scale.utils.files import os_error_in_words
from lipnext_scale.utils.progress import beat

# Steps after which the host reads at the latest what happened on a GPU: signals must not wait.
READ_EVERY = 100


class Trainer:
    """A run: built from a recipe, continued from its newest checkpoint, trained to the end.

    It alone decides what ends a run: the last step, a signal, a failure.
    """

    def __init__(self, recipe: Recipe, request: StopRequest | None = None) -> None:
        self.recipe = recipe
        self.request = request or StopRequest()  # a signal may come before the first step
        torch.manual_seed(recipe.run.seed)  # nothing draws from it yet, and nothing may differ
        model, run = recipe.model, recipe.run
        self.directory = RunDirectory(run.dir)
        known = self.directory.intact_files()
        self.data = DataSets(
            recipe.data, model.image_size, model.in_channels, model.num_classes, known
        )
        timeout = collective_timeout(run.hang_timeout)
        self.engine = build_engine(recipe.parallel, run.device, timeout=timeout)
        self.processes = self.engine.processes
        rank, world_size = self.processes.rank, self.processes.world_size
        self.is_rank0 = rank == 0
        recipe.require_batch_for(world_size)
        require_same_samples(self.data.all, self.processes)
        pin_memory = self.processes.device.type == "cuda"
        self.loader = self.data.training_loader(run.seed, rank, world_size, pin_memory)
        # The steps of the schedule, and where this process stops.
        self.total_steps = recipe.optim.epochs * self.loader.steps_per_epoch
        self.last_step = min(self.total_steps, run.max_steps or self.total_steps)
        require_reachable_window(run, self.last_step, world_size)
        self.processes.on_rank0(lambda: self.directory.require_free_or_same(recipe))
        checked: list[str] = []
        if recipe.data.verify:
            checked = require_intact_shards(self.data.all, self.processes, known)
        self.model = self._build_model()
        self.optimizers = self.engine.optimizers(recipe.optim)
        self.non_finite = NonFinitePolicy(run)
        self.checkpointer = Checkpointer(
            self.directory.checkpoints,
            run,
            self.engine,
            self.optimizers,
            self.loader,
            self.non_finite,
        )
        self.stop_signal: Signals | None = None
        # [request, usable] of steps that the host has not read yet.
        self._unread: list[Tensor] = []
        self.step = self.checkpointer.resume()
        self.observer = Observer(
            recipe,
            self.directory,
            self.engine,
            self.optimizers,
            self.data,
            self.loader,
            self.last_step,
            self.total_steps,
        )
        classes = self.data.class_names
        self.processes.on_rank0(lambda: self.directory.open_for(recipe, checked, classes))
        self.bad_samples = BadSamples(
            recipe.data.bad_sample_limit, self.directory.bad_samples, writes=self.is_rank0
        )
        if self.step:
            self._print(f"continuing {self.directory.path} from step {self.step}")

    @property
    def reads_every_step(self) -> bool:
        """Or what happened is read with the next line that is printed: a host that reads waits for
        its GPU."""
        return self.processes.device.type == "cpu"

    def _build_model(self) -> LipNeXt:
        """The model on its processes, with its initial weights."""
        config = self.recipe.model
        try:
            return self.engine.build(config, self.recipe.run.seed)
        except RuntimeError as error:
            if not is_out_of_memory(error) and "overflow" not in str(error):
                raise
            gigabytes = 4 * config.bank_parameters / 1e9
            right = (
                f"with depth {config.depth} the matrices alone take {gigabytes:.3g} GB: too much "
                f"for {self.processes.world_size} process(es) with {self.engine.describe()}"
            )
            raise ConfigError("model.width", config.width, right) from error

    def run(self) -> None:
        run = self.recipe.run
        if self.step >= self.last_step:
            done = f"already at step {self.step} of {self.last_step}: nothing to do"
            self._print(f"{run.dir}: {done}")
            self.directory.lock.release()
            return
        self.observer.open(self.step)
        self.observer.say(self._introduction())
        if why := self.engine.why_plain():
            self.observer.say(f"blocks are computed without Triton kernels: {why}")
        try:
            with self._watching(), stop_requests(self.request), self.checkpointer.finishing():
                self._loop()
            self.observer.finish()
        except BrokenPipeError:  # of the reader of our output: not the run's
            raise
        except (OSError, RuntimeError) as error:
            lost = isinstance(error, RuntimeError) and lost_a_peer(error)
            if lost and self.request.signal is not None and not self.is_rank0:
                raise_signal(self.request.signal)  # the launcher waits for our end
            reason = self._reason(error)
            if reason is None:
                raise
            raise RunFailed(f"{reason}; the same command continues {run.dir}") from None
        finally:
            self.observer.close()
            self.directory.lock.release()
        self._print(f"{run.dir}: at step {self.step} of {self.total_steps}")

    def _reason(self, error: OSError | RuntimeError) -> str | None:
        """Why a run ended that can be continued; None: a bug."""
        if isinstance(error, OSError):
            return f"step {self.step}: {os_error_in_words(error, self.directory.path)}"
        if lost_a_worker(error):
            return (
                f"step {self.step}: a process that makes batches (data.workers) has ended: was it "
                "killed for lack of memory?"
            )
        if is_out_of_memory(error):
            share = self.recipe.data.batch_size // self.processes.world_size
            return (
                f"step {self.step + 1}: out of memory on {self.processes.device} with {share} "
                "images a process; a larger parallel.accumulation, "
                "parallel.recompute_activations=true or more processes help"
            )
        return f"step {self.step}: another process has ended" if lost_a_peer(error) else None

    def _watching(self) -> AbstractContextManager[None]:
        hangs, processes = self.directory.hangs, self.processes
        processes.on_rank0(lambda: clear_empty_reports(hangs))
        start = processes.on_rank0(lambda: time.strftime("%Y-%m-%d_%H-%M-%S"))
        timeout = self.recipe.run.hang_timeout
        return watching(timeout, hangs / start, processes.rank, processes.world_size)

    def _print(self, line: str) -> None:
        if self.is_rank0:
            print(line, flush=True)

    def _introduction(self) -> str:
        model, count = self.recipe.model, self.processes.world_size
        kind: str = model.layer
        numbers = f"{self.engine.parameter_count():,}"
        if model.layer == "manifold":
            others = self.engine.parameter_count() - model.bank_parameters
            kind = self.recipe.optim.parametrisation
            numbers = f"{model.bank_parameters:,} orthogonal and {others:,} other"
        places = f"{count} × {self.processes.device.type}" if count > 1 else self.processes.device
        origin = f"; {self.checkpointer.origin}" if self.checkpointer.origin else ""
        return (
            f"LipNeXt L{model.depth}W{model.width} ({kind}): {numbers} parameters on "
            f"{places} ({self.engine.describe()}), {self.total_steps} steps, "
            f"into {self.recipe.run.dir}{origin}"
        )

    def _loop(self) -> None:
        for batch in self.loader:
            with self.observer.step(self.step + 1):
                values = self.train_step(batch)
            if batch.last_of_epoch or self._is_read_after(self.step):
                self._read_steps()
            self._after_step(values)
            if batch.last_of_epoch and self._evaluation_is_due(batch.epoch):
                self.observer.evaluate(self.step)
            done = self.step == self.last_step
            self._save_or_stop(done)
            if done:
                return
            beat(f"step {self.step + 1}")

    def _after_step(self, values: dict[str, float | Tensor]) -> None:
        beat()
        self.checkpointer.warn_of_failure()
        values |= self.non_finite.metrics() | self.checkpointer.metrics()
        if self.observer.prints_after(self.step):
            values |= self._count_bad_samples()
        self.observer.after_step(self.step, values)

    def _count_bad_samples(self) -> dict[str, int]:
        """Name the samples of all ranks that were replaced; too many end the run."""
        if self.recipe.data.on_bad_sample != "substitute":
            return {}
        reports = self.processes.gather_objects(self.loader.stats.take_bad())
        for line in self.bad_samples.add([bad for of_rank in reports for bad in of_rank]):
            self.observer.say(line)
        return {"data/bad_samples": len(self.bad_samples)}

    def _save_or_stop(self, done: bool) -> None:
        run, signal = self.recipe.run, self.stop_signal
        regular = run.checkpoint_every and self.step % run.checkpoint_every == 0
        if done or regular or signal:
            self.save()
        if signal and not done:
            self._count_bad_samples()
            self.checkpointer.writer.wait()
            reason = f"{signal.name} at step {self.step}: saved"
            if signal is Signals.SIGUSR1:
                self.processes.on_rank0(lambda: self.directory.ask_for_requeue(reason))
            raise Stopped(signal, f"{reason}; the same command continues {run.dir}")

    def train_step(self, batch: Batch) -> dict[str, float | Tensor]:
        """One optimizer step on one batch; after an epoch's last one, the polar retraction."""
        optim, steps = self.recipe.optim, self.loader.steps_per_epoch
        lr = self.optimizers.set_learning_rate(
            self.step, self.total_steps, round(optim.warmup_epochs * steps)
        )
        epsilon = training_radius(self.recipe.loss, self.step / steps, optim.epochs)
        images = to_unit_range(batch.images, self.processes.device)
        labels = batch.labels.to(self.processes.device, non_blocking=True)

        self.optimizers.zero_grad()
        loss, accuracy = self._gradients(images, labels, epsilon)
        self.observer.gradients_made()
        norm = self.engine.gradient_norm()
        loss, accuracy, request = self._over_all_ranks(loss, accuracy)
        clip = (optim.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.reads_every_step:
            self.stop_signal = Signals(int(request)) if request else None
            updated = self._is_finite(loss, norm)
            if updated:
                self._update(clip, torch.ones((), dtype=torch.bool))
        else:
            usable, updated = torch.isfinite(loss + norm), True
            self._unread.append(torch.stack([request, usable.to(request)]))
            self._update(clip, usable)
        self.step += 1
        self.observer.weights_moved(self.non_finite.updates(self.step) if updated else 0)
        if batch.last_of_epoch and optim.retract_each_epoch:
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

    def _over_all_ranks(self, loss: Tensor, accuracy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Their means over ranks, and the signal that any rank got: all act on it alike."""
        request = torch.full_like(loss, self.request.signal or 0)
        gathered = self.processes.gather(torch.stack([loss, accuracy, request]))
        return gathered[:, 0].mean(), gathered[:, 1].mean(), gathered[:, 2].max()

    def _is_read_after(self, step: int) -> bool:
        """Whether the host needs to know after this step what happened on the device."""
        every = self.recipe.run.checkpoint_every
        due = step % READ_EVERY == 0 or bool(every and step % every == 0)
        return due or self.observer.prints_after(step)

    def _read_steps(self) -> None:
        """Signals and skipped updates of the steps since the last call, in one transfer."""
        if not self._unread:
            return
        rows = torch.stack(self._unread).tolist()
        self._unread.clear()
        request = int(max(request for request, _ in rows))
        self.stop_signal = Signals(request) if request else None
        for step, (_, usable) in enumerate(rows, start=self.step - len(rows) + 1):
            if not usable:
                line = self.non_finite.skip(step, "the loss or a gradient is not finite")
                self.observer.say(line)
        if not all(usable for _, usable in rows):  # the optimizers have counted these too
            self.optimizers.set_step(self.non_finite.updates(self.step))

    def _update(self, clip: Tensor, usable: Tensor | None = None) -> None:
        try:
            self.optimizers.step(clip, usable)
        except FloatingPointError as error:
            saved = latest_checkpoint(self.directory.checkpoints) is not None
            intact = "; the last checkpoint is intact" if saved else ""
            raise RunFailed(f"step {self.step + 1}: {error}; lower optim.lr{intact}") from None

    def _is_finite(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether there is an update; if not, the policy skips the step or ends the run."""
        what = what_is_not_finite(self.engine, loss, norm)
        if what is not None:
            self.observer.say(self.non_finite.skip(self.step + 1, what))
            self.engine.discard_gradients()
        return what is None

    def _evaluation_is_due(self, epoch: int) -> bool:
        every = self.recipe.run.eval_every
        return bool(every) and ((epoch + 1) % every == 0 or epoch + 1 == self.recipe.optim.epochs)

    def save(self) -> None:
        beat(f"the checkpoint of step {self.step}", slow=True)
        self.checkpointer.save(self.step)
