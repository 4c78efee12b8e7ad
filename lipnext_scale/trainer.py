"""The training loop: data → model → loss → engine → optimizers, and what happens between steps."""

import time

import torch
from torch import Tensor

from lipnext_scale.certify.radius import evaluate_radii
from lipnext_scale.checkpoint import latest_checkpoint, load_checkpoint, restore, save_checkpoint
from lipnext_scale.config import ConfigError
from lipnext_scale.data import Batch, Loader, MemoryLoader, read_samples
from lipnext_scale.errors import RunFailed, Stopped, UserError
from lipnext_scale.losses import class_distances, compute_loss, training_radius
from lipnext_scale.metrics import Metrics, Progress
from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import Optimizers
from lipnext_scale.parallel import build_engine
from lipnext_scale.recipe import Recipe
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.stopping import StopWish, stop_wishes


class Trainer:
    """A run: built from a recipe, continued from its newest checkpoint, trained to the end."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        torch.manual_seed(recipe.run.seed)  # nothing draws from it yet, and nothing may differ
        train = read_samples(recipe.data.train, "data.train", recipe.data.memory_limit_gb)
        self.test = read_samples(recipe.data.test, "data.test", recipe.data.memory_limit_gb)
        for key, samples in (("data.train", train), ("data.test", self.test)):
            model = recipe.model
            samples.require_fits(key, model.image_size, model.in_channels, model.num_classes)
        self.loader: Loader = MemoryLoader(train, recipe.data, recipe.run.seed)
        self.engine = build_engine(recipe.parallel, choose_device(recipe.run.device))
        self.model = self._build_model()
        self.optimizers = Optimizers(self.model, recipe.optim)
        self.directory = RunDirectory(recipe.run.dir)
        self.directory.open_for(recipe)
        self.step = 0
        self._resume()

    def _build_model(self) -> LipNeXt:
        """The model on its device, with its initial weights."""
        config = self.recipe.model
        try:
            with torch.device("meta"):
                model = LipNeXt(config)
            return self.engine.prepare(model, self.recipe.run.seed)
        except RuntimeError as error:
            # What the allocators say: "can't allocate memory", "out of memory", "overflowed".
            if not any(word in str(error) for word in ("memory", "overflow")):
                raise
            gigabytes = 4 * config.bank_parameters / 1e9
            right = (
                f"with depth {config.depth} the matrices alone take {gigabytes:.3g} GB: too much"
            )
            raise ConfigError("model.width", config.width, right) from None

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
            print(f"{run.dir}: already at step {self.step} of {self.last_step}; nothing to train")
            return
        try:
            metrics = Metrics(self.directory.metrics, self.directory.tensorboard, self.step)
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None
        print(self._introduction(), flush=True)
        progress = Progress(self.last_step, self.step, title="train")
        try:
            with stop_wishes() as wish:
                self._loop(metrics, progress, wish)
        except OSError as error:
            where = error.filename or run.dir
            raise RunFailed(f"step {self.step}: {where}: {error.strerror}") from None
        finally:
            progress.close()
            metrics.close()
        print(f"{run.dir}: at step {self.step} of {self.total_steps}", flush=True)

    def _introduction(self) -> str:
        model = self.recipe.model
        others = sum(p.numel() for p in self.model.parameters()) - model.bank_parameters
        return (
            f"LipNeXt L{model.depth}W{model.width} ({model.parametrisation}): "
            f"{model.bank_parameters:,} orthogonal and {others:,} other parameters on "
            f"{self.engine.device}, {self.total_steps} steps, into {self.recipe.run.dir}"
        )

    def _loop(self, metrics: Metrics, progress: Progress, wish: StopWish) -> None:
        run = self.recipe.run
        clock, timed_from = time.perf_counter(), self.step
        for batch in self.loader:
            values = self.train_step(batch)
            progress.advance()
            done = self.step == self.last_step
            due = self.step % run.log_every == 0 or self.step == self.total_steps
            if due or done:
                rate = (self.step - timed_from) / (time.perf_counter() - clock)
                clock, timed_from = time.perf_counter(), self.step
                told = {name: float(value) for name, value in values.items()}
                told["images_per_second"] = rate * len(batch.labels)
                if due:  # a stop in between leaves no trace in the metrics
                    metrics.write(self.step, told)
                progress.say(self._line(batch, told))
            if batch.last_of_epoch and self._evaluation_is_due(batch.epoch):
                scores = self.evaluate()
                metrics.write(self.step, scores)
                progress.say("  " + "  ".join(f"{k} {v:.4f}" for k, v in scores.items()))
            regular = run.checkpoint_every and self.step % run.checkpoint_every == 0
            if done or regular or wish.signal:
                self.save()
            if wish.signal and not done:
                told_by = f"{wish.signal.name} at step {self.step}: saved"
                raise Stopped(wish.signal, f"{told_by}; the same command continues {run.dir}")
            if done:
                return

    def train_step(self, batch: Batch) -> dict[str, float | Tensor]:
        """One optimizer step on one batch; after an epoch's last one, the polar retraction."""
        optim, steps = self.recipe.optim, self.loader.steps_per_epoch
        lr = self.optimizers.set_learning_rate(
            self.step, self.total_steps, round(optim.warmup_epochs * steps)
        )
        epsilon = training_radius(self.recipe.loss, self.step / steps, optim.epochs)
        images = to_unit_range(batch.images, self.engine.device)
        labels = batch.labels.to(self.engine.device)

        self.optimizers.zero_grad()
        logits = self.model(images)
        distances = class_distances(self.model.head.normalized_weight())
        loss = compute_loss(self.recipe.loss, logits, labels, distances, epsilon)
        self.engine.backward(loss)
        norm = self.engine.gradient_norm(self.model)
        self._require_finite(loss, norm)
        self.engine.clip_gradients(self.model, optim.clip_norm, norm)
        self._update()
        self.step += 1
        if batch.last_of_epoch:
            self.optimizers.retract()
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {
            "train/loss": loss.detach(),
            "train/accuracy": accuracy,
            "train/gradient_norm": norm,
            "train/lr": lr,
            "train/epsilon": epsilon,
        }

    def _update(self) -> None:
        try:
            self.optimizers.step()
        except FloatingPointError as error:
            raise RunFailed(
                f"step {self.step + 1}: {error}; the matrices were not moved; lower optim.lr"
            ) from None

    def _require_finite(self, loss: Tensor, norm: Tensor) -> None:
        """Stop before the update, naming the step and the first tensor that is not finite."""
        if bool(torch.isfinite(loss + norm)):  # one look at the device for both
            return
        where = f"step {self.step + 1}"
        if not torch.isfinite(loss):
            raise RunFailed(f"{where}: the loss is {loss.item()}; the weights were not updated")
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
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
        with self.optimizers.slow_weights():
            labels, radii = evaluate_radii(self.model, self.test.images, lipschitz=1.0)
        correct = labels == self.test.labels
        certified = correct & (radii >= self.recipe.loss.epsilon)
        return {
            "test/clean_accuracy": correct.double().mean().item(),
            "test/nominal_cra": certified.double().mean().item(),
        }

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
        state = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "loader": self.loader.state_dict(),
            "rng": torch.get_rng_state(),
        }
        keep = self.recipe.run.keep_checkpoints
        save_checkpoint(self.directory.checkpoints, self.step, state, keep)

    def _resume(self) -> None:
        path = latest_checkpoint(self.directory.checkpoints)
        if path is None:
            return
        state = load_checkpoint(path)
        restore(path, self.model, state["model"])
        restore(path, self.optimizers, state["optimizers"])
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]
        print(f"continuing {self.directory.path} from step {self.step}")


def to_unit_range(images: Tensor, device: torch.device) -> Tensor:
    """uint8 → float32 in [0, 1], converted on the device."""
    return images.to(device, non_blocking=True).float().div_(255)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device", name, "no GPU is visible here; use cpu or auto")
    return torch.device(name)
