"""The training loop: data → model → loss → engine → optimizers, and what happens between steps."""

import time
from contextlib import AbstractContextManager
from signal import Signals, raise_signal

import torch
from torch import Tensor

from lipnext_scale.config import ConfigError
from lipnext_scale.data import Batch, DataSets, StreamLoader
from lipnext_scale.data.workers import lost_a_worker
from lipnext_scale.data_check import require_same_samples, require_whole_shards
from lipnext_scale.errors import RunFailed, Stopped
from lipnext_scale.faults.non_finite import what_is_not_finite
from lipnext_scale.faults.watchdog import collective_timeout, watching
from lipnext_scale.files import os_error_in_words
from lipnext_scale.heartbeat import beat
from lipnext_scale.losses import class_distances, compute_loss, training_radius
from lipnext_scale.models import LipNeXt
from lipnext_scale.observe import Observer, to_unit_range
from lipnext_scale.parallel import build_engine, is_out_of_memory, lost_a_peer
from lipnext_scale.recipe import Recipe
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.run_state import RunState
from lipnext_scale.stopping import StopRequest, stop_requests


class Trainer:
    """A run: built from a recipe, continued from its newest checkpoint, trained to the end."""

    def __init__(self, recipe: Recipe, request: StopRequest | None = None) -> None:
        self.recipe = recipe
        self.request = request or StopRequest()  # it may be there before the first step
        torch.manual_seed(recipe.run.seed)  # nothing draws from it yet, and nothing may differ
        model = recipe.model
        self.directory = RunDirectory(recipe.run.dir)
        known = self.directory.whole_files()
        self.data = DataSets(
            recipe.data, model.image_size, model.in_channels, model.num_classes, known
        )
        self.engine = build_engine(
            recipe.parallel,
            recipe.run.device,
            batch_size=recipe.data.batch_size,
            timeout=collective_timeout(recipe.run.hang_timeout),
        )
        self.processes = self.engine.processes
        self.loader = self._build_loader()
        self.processes.on_rank0(lambda: self.directory.require_free_or_same(recipe))
        checked = self._check_shards(known)
        self.model = self._build_model()
        self.optimizers = self.engine.optimizers(recipe.optim)
        self.state = RunState(self.directory, recipe.run, self.engine, self.model, self.optimizers)
        self.stop_signal: Signals | None = None
        self.step = self.state.resume(self.loader)
        self.observer = Observer(
            recipe, self.engine, self.optimizers, self.data, self.loader, self.step
        )
        self.processes.on_rank0(lambda: self.directory.open_for(recipe, checked))
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

    def _check_shards(self, known: frozenset[str]) -> list[str]:
        """What is known of the shards after looking at those that have not been looked at."""
        if not self.recipe.data.verify:
            return []
        return require_whole_shards(self.data.all, self.processes, known)

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

    @property
    def total_steps(self) -> int:
        """The steps of the whole schedule."""
        return self.observer.total_steps

    @property
    def last_step(self) -> int:
        """Where this process stops."""
        return self.observer.last_step

    def run(self) -> None:
        run = self.recipe.run
        if self.step >= self.last_step:
            self._say(f"{run.dir}: already at step {self.step} of {self.last_step}: nothing to do")
            self.directory.lock.release()
            return
        self.observer.open(self.directory)
        self.observer.say(self._introduction())
        try:
            with self._watching(), stop_requests(self.request), self.state.finishing():
                self._loop()
            self.observer.finish()
        except BrokenPipeError:  # of whoever reads our output: not the run's
            raise
        except OSError as error:
            why = os_error_in_words(error, self.directory.path)
            raise RunFailed(
                f"step {self.step}: {why}; the same command continues {run.dir}"
            ) from None
        except RuntimeError as error:
            if lost_a_worker(error):
                raise RunFailed(
                    f"step {self.step}: a process that makes batches (data.workers) has ended: was "
                    f"it killed for lack of memory?; the same command continues {run.dir}"
                ) from None
            if is_out_of_memory(error):
                raise RunFailed(f"step {self.step + 1}: {self._out_of_memory()}") from None
            if not lost_a_peer(error):
                raise
            if self.request.signal is not None and not self.is_first:
                raise_signal(self.request.signal)  # the launcher waits for our end
            raise RunFailed(
                f"step {self.step}: another process has ended; the same command continues {run.dir}"
            ) from None
        finally:
            self.observer.close()
            self.directory.lock.release()
        self._say(f"{run.dir}: at step {self.step} of {self.total_steps}")

    def _out_of_memory(self) -> str:
        share = self.recipe.data.batch_size // self.processes.world_size
        return (
            f"out of memory on {self.processes.device} with {share} images a process; a larger "
            "parallel.accumulation, parallel.recompute_activations=true or more processes help; "
            f"the same command with that continues {self.recipe.run.dir}"
        )

    def _watching(self) -> AbstractContextManager[None]:
        start = self.processes.on_rank0(lambda: time.strftime("%Y-%m-%d_%H-%M-%S"))
        return watching(
            self.recipe.run.hang_timeout,
            self.directory.hangs / start,
            self.processes.rank,
            self.processes.world_size,
        )

    def close(self) -> None:
        """Leave the other processes."""
        self.processes.close()

    def _say(self, line: str) -> None:
        if self.is_first:
            print(line, flush=True)

    def _introduction(self) -> str:
        model, count = self.recipe.model, self.processes.world_size
        others = self.engine.parameter_count() - model.bank_parameters
        places = f"{count} × {self.processes.device.type}" if count > 1 else self.processes.device
        return (
            f"LipNeXt L{model.depth}W{model.width} ({model.parametrisation}): "
            f"{model.bank_parameters:,} orthogonal and {others:,} other parameters on "
            f"{places} ({self.engine.describe()}), {self.total_steps} steps, "
            f"into {self.recipe.run.dir}"
        )

    def _loop(self) -> None:
        for batch in self.loader:
            with self.observer.step(self.step + 1):
                values = self.train_step(batch)
            beat()
            self.state.tell_failure()
            self.state.non_finite.tell(values)
            self.observer.after_step(self.step, values)
            if batch.last_of_epoch and self._evaluation_is_due(batch.epoch):
                self.observer.evaluate(self.step)
            done = self.step == self.last_step
            self._save_or_stop(done)
            if done:
                return
            beat(f"step {self.step + 1}")

    def _save_or_stop(self, done: bool) -> None:
        run, signal = self.recipe.run, self.stop_signal
        regular = run.checkpoint_every and self.step % run.checkpoint_every == 0
        if done or regular or signal:
            self.save()
        if signal and not done:
            self.observer.tell_bad_samples({})
            self.state.wait()
            told_by = f"{signal.name} at step {self.step}: saved"
            if signal is Signals.SIGUSR1:
                self.processes.on_rank0(lambda: self.directory.ask_for_requeue(told_by))
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
        self.observer.gradients_made()
        norm = self.engine.gradient_norm()
        loss, accuracy = self._over_all_ranks(loss, accuracy)
        finite = self._is_finite(loss, norm)
        if finite:
            self.engine.clip_gradients(optim.clip_norm, norm)
            self._update()
        self.step += 1
        self.observer.weights_moved(self.state.non_finite.updates(self.step) if finite else 0)
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
        """Their means over ranks, and whether any rank was asked to stop: all act on it alike."""
        request = torch.full_like(loss, self.request.signal or 0)
        told = self.processes.gather(torch.stack([loss, accuracy, request]))
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

    def _is_finite(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether there is an update; if not, the run ends or `run.on_non_finite` has been done."""
        what = what_is_not_finite(self.engine, loss, norm)
        if what is not None:
            self.observer.say(self.state.without_update(self.step + 1, what))
        return what is None

    def evaluate(self) -> dict[str, float]:
        """Clean and certified accuracy of the slow weights on the test set, taking K as 1."""
        return self.observer.scores.of_test_set()

    def _evaluation_is_due(self, epoch: int) -> bool:
        every = self.recipe.run.eval_every
        return bool(every) and ((epoch + 1) % every == 0 or epoch + 1 == self.recipe.optim.epochs)

    def save(self) -> None:
        beat(f"the checkpoint of step {self.step}", slow=True)
        self.state.save(self.step, self.loader)
