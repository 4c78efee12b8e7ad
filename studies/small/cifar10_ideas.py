"""Ideas for configs/cifar10_small.yaml that no setting makes, beside those of cifar10_search.

    python studies/small/cifar10_ideas.py [--jobs 2]

One epoch each, certified and attacked on an eighth of the training set that is held out.
"""

import lipnext_scale.utils.passive  # noqa: F401

import argparse
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from lipnext_scale import attack, certify
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.data import Batch
from lipnext_scale.manifold import skew
from lipnext_scale.models import LipNeXt
from lipnext_scale.studies.comparison import read_run, write_tables
from lipnext_scale.studies.runner import share_of_machine
from lipnext_scale.training.trainer import Trainer

CONFIG = "builtin:cifar10_small.yaml"
DIRECTORY = Path("runs/studies/small/cifar10_ideas")
SETTINGS = [
    "data.train=data/cifar10/train-{000000..000006}.tar",
    "data.test=data/cifar10/train-000007.tar",
    "data.augment.crop_padding=1",  # as cifar10_search
    "loss.logit_scale=1",
    "model.depth=3",
    "optim.parametrisation=merged",
    "optim.epochs=1",
    "optim.warmup_epochs=0.05",
    "run.eval_every=0",
]


class SmallRotations(Trainer):
    """R = exp(angle·A), W = Rᵀ at the start; ‖A‖₂ is about 2. 0: R = W = I."""

    angle = 0.0

    def _build_model(self) -> LipNeXt:
        model = super()._build_model()
        for group in model.block_groups():
            size = group.bank.shape[-1]
            noise = torch.randn(group.count, size, size) / math.sqrt(size)
            rotation = torch.matrix_exp(self.angle * math.sqrt(2) * skew(noise))
            with torch.no_grad():
                group.bank.copy_(torch.stack([rotation, rotation.mT], 1))
        return model


class TenthOfRadian(SmallRotations):
    angle = 0.1


class ScheduledScale(Trainer):
    """The logit scale of the loss moves from one value to the other, geometrically."""

    scales = (4.0, 1.0)

    def train_step(self, batch: Batch) -> dict[str, float | torch.Tensor]:
        (first, last), done = self.scales, self.step / self.total_steps
        loss = replace(self.recipe.loss, logit_scale=first ** (1 - done) * last**done)
        self.recipe = replace(self.recipe, loss=loss)
        return super().train_step(batch)


class RisingScale(ScheduledScale):
    scales = (0.5, 2.0)


class Average(Trainer):
    """The mean of the weights of the last quarter, matrices retracted, is what is certified."""

    def train_step(self, batch: Batch) -> dict[str, float | torch.Tensor]:
        values = super().train_step(batch)
        if self.step <= 0.75 * self.total_steps:
            return values
        weights = [parameter.detach() for parameter in self.model.parameters()]
        if not hasattr(self, "sums"):
            self.sums, self.count = [torch.zeros_like(weight) for weight in weights], 0
        self.count += 1
        torch._foreach_add_(self.sums, weights)
        if self.step == self.total_steps:
            for weight, total in zip(weights, self.sums, strict=True):
                weight.copy_(total / self.count)
            self.optimizers.retract()
        return values


class Growing(Trainer):
    """Three sevenths of the images by a network half as wide, which then becomes a part of this.

    Steps and time of the table are those of the wide one alone.
    """

    def _build_model(self) -> LipNeXt:
        recipe = load_recipe(CONFIG, [*SETTINGS, f"run.dir={self.directory.path}/narrow"])
        data = replace(recipe.data, train="data/cifar10/train-{000000..000002}.tar")
        model = replace(recipe.model, width=self.recipe.model.width // 2)
        first = Trainer(replace(recipe, data=data, model=model))
        first.run()
        grown = super()._build_model()
        with torch.no_grad():
            grow(first.model, grown)
        return grown


def grow(narrow: LipNeXt, wide: LipNeXt) -> None:
    """Nearly the narrow network's function. Its channels go where they have the same shift and the
    same activation, of the recipe's α and β; other channels begin as the identity leaves them."""
    n, w = narrow.config.width, wide.config.width
    shifted = [w * 3 // 4 + side * w // 16 + torch.arange(n // 16) for side in range(4)]
    place = torch.cat([torch.arange(n * 3 // 4), *shifted])
    for small, large in zip(narrow.block_groups(), wide.block_groups(), strict=True):
        large.bank.copy_(torch.eye(w))
        large.bank[..., place[:, None], place] = small.bank
        large.bias[:, place] = small.bias
        large.pos.copy_(small.pos)
    small, large = narrow.neck, wide.neck
    squares = large.squares.view(w, -1, w)
    squares[:, :, place] = 0
    squares[place] = 0
    squares[place[:, None, None], torch.arange(squares.shape[1])[:, None], place] = (
        small.squares.view(n, -1, n)
    )
    large.vector.mul_(0.1).unflatten(1, (-1, w))[..., place] = small.vector.unflatten(1, (-1, n))
    large.bias.copy_(small.bias)
    wide.head.load_state_dict(narrow.head.state_dict())


def linear(step: int, lr: float, total: int, warmup: int, final_ratio: float) -> float:
    return lr * min((step + 1) / max(1, warmup), (total - step) / max(1, total - warmup))


def falling_radius(config: object, epoch: float, epochs: float) -> float:
    """From r_max to r_min·ε over the second half: large radii first."""
    share = min(1.0, 2 * (1 - epoch / epochs))
    return config.epsilon * (config.radius_min + (config.radius_max - config.radius_min) * share)


RADIUS = "lipnext_scale.training.trainer.training_radius"
IDEAS = {
    "the recipe": (Trainer, None),
    "R = I": (SmallRotations, None),
    "R = exp(0.1 A)": (TenthOfRadian, None),
    "scale 4 to 1": (ScheduledScale, None),
    "scale 0.5 to 2": (RisingScale, None),
    "mean of the last quarter": (Average, None),
    "linear lr": (Trainer, ("lipnext_scale.optim.optimizers.learning_rate", linear)),
    "width 96, then 192": (Growing, None, "data.train=data/cifar10/train-{000003..000006}.tar"),
    "large radii first": (Trainer, (RADIUS, falling_radius)),
}


def directory_of(name: str) -> Path:
    return DIRECTORY / name.replace(" ", "_")


def run(name: str) -> str:
    trainer, change, *settings = IDEAS[name]
    path = directory_of(name)
    path.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(CONFIG, [*SETTINGS, *settings, f"run.dir={path}"])
    with (path / "study.log").open("a") as log, redirect_stdout(log):
        if change is None:
            trainer(recipe).run()
        else:
            with patch(*change):
                trainer(recipe).run()
        certify.main(["--model", str(path)])
        attack.main([f"--model={path}", "--samples=50", "--steps=20", "--restarts=2"])
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="ideas at a time (1)")
    jobs = parser.parse_args().jobs
    threads = int(share_of_machine(0, jobs, 1).get("OMP_NUM_THREADS", torch.get_num_threads()))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
        for done in as_completed([pool.submit(run, name) for name in IDEAS]):
            print(f"done: {done.result()}", file=sys.stderr)
    groups = {name: [read_run(directory_of(name), name)] for name in IDEAS}
    print("\n".join(write_tables(DIRECTORY, "Ideas", groups, [])))


if __name__ == "__main__":
    main()
