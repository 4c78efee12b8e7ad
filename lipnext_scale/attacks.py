"""Attacks: they test certificates, and show how robust a model is beyond what is proven.

From bottom to top: PGD and Auto-PGD, pure functions on tensors; attacks on a certified model; what
they are for (`hunt`, `robust_at`, `nearest_change`); what attack.json holds.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipnext_scale.certification.certificate import (
    Arrays,
    SampleResults,
    radius_name,
    wilson_interval,
)
from lipnext_scale.certification.certifier import Certifier
from lipnext_scale.data import TestBatch, to_unit_range
from lipnext_scale.data.order import sample_bits
from lipnext_scale.models.layers import Convolution

Classifier = Callable[[Tensor], Tensor]  # NCHW images → logits


def random_starts(
    shape: tuple[int, ...], seed: int, ids: Tensor, restart: int, stream: int
) -> Tensor:
    """Points of the unit ball [N, *shape] to start at, in float32 on the CPU.

    They depend on (seed, sample, restart, method) alone, not on the batch or the process. The
    direction is uniform, the length too: in many dimensions points that are uniform in a ball all
    lie on its surface, and the image's own neighbourhood would never be searched.
    """
    starts = torch.empty(len(ids), *shape)
    drawn = sample_bits(seed, restart, ids.cpu().numpy(), stream)
    for start, bits in zip(starts, drawn, strict=True):
        generator = torch.Generator().manual_seed(int(bits) >> 1)
        start.normal_(generator=generator)
        start.mul_(torch.rand((), generator=generator) / start.norm().clamp_min(1e-30))
    return starts


# --------------------------------------------------------------------------------------------------
# Projected gradient descent on the margin, in the l2 norm.

FIRST_STEP = 0.5  # of the radius


def pgd(
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    radii: Tensor,
    starts: Tensor,
    steps: int,
    clip: bool = False,
) -> Tensor:
    """Perturbations within `radii`, one each, that minimise the smallest margin of `labels`.

    starts: where to begin, in the unit ball. clip: images + perturbations stay in [0, 1], where
    images must be. Step lengths fall linearly to 0; the best point on the way is kept. The result
    is perturbations, not images: they have more digits than their sum with an image.
    """
    radii = radii.to(images.dtype).view(-1, 1, 1, 1)
    delta = into_reach(starts * radii, images, radii, clip)
    best = Best(delta)
    for step in range(steps):
        margins, gradient = margins_and_gradient(model, images, labels, delta)
        best.update(delta, margins)
        length = FIRST_STEP * (1 - step / steps) * radii
        delta = into_reach(delta - length * unit(gradient), images, radii, clip)
    best.update(delta, margins_at(model, images, labels, delta))
    return best.delta


class Best:
    """Of every image the perturbation with the smallest margin so far."""

    def __init__(self, delta: Tensor) -> None:
        self.delta = delta
        self.margins = torch.full_like(delta[:, 0, 0, 0], float("inf"))

    def update(self, delta: Tensor, margins: Tensor) -> Tensor:
        """Keep what is better; returns for which images it is."""
        better = margins < self.margins
        self.margins = torch.where(better, margins, self.margins)
        self.delta = _where(better, delta, self.delta)
        return better


def margins_and_gradient(
    model: Classifier, images: Tensor, labels: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest margins at images + delta, and their gradients in delta alone."""
    with torch.enable_grad():
        delta = delta.detach().requires_grad_(True)
        margins = smallest_margins(model(images + delta), labels)
        (gradient,) = torch.autograd.grad(margins.sum(), delta)
    return margins.detach(), gradient


@torch.no_grad()
def margins_at(model: Classifier, images: Tensor, labels: Tensor, delta: Tensor) -> Tensor:
    return smallest_margins(model(images + delta), labels)


def smallest_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """logit_label - max of the others: negative where the prediction has changed."""
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], float("-inf"))
    return own - others.max(1).values


def into_reach(delta: Tensor, images: Tensor, radii: Tensor, clip: bool) -> Tensor:
    """Into the ball of `radii` and, with clip, the box [0, 1].

    The box comes first: the ball only shortens delta, which does not leave a convex box around the
    image.
    """
    if clip:
        delta = (images + delta).clamp(0, 1) - images
    return delta * (radii / norms(delta)).clamp(max=1)


def norms(delta: Tensor) -> Tensor:
    """l2 norms as [N, 1, 1, 1], never 0."""
    return delta.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1, 1)


def unit(gradient: Tensor) -> Tensor:
    """The direction of a gradient; 0 for a zero gradient."""
    return gradient / norms(gradient)


def _where(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(mask.view(-1, 1, 1, 1), one, other)


# --------------------------------------------------------------------------------------------------
# Auto-PGD (Croce and Hein, 2020) for the l2 norm: it adapts its step lengths.
#
# It minimises the margin, not the paper's DLR loss, which divides the margin by a difference of
# other logits to be free of their scale. Only the direction of a gradient is used here: a factor
# would change nothing, and the gradient of the denominator would lead away from the boundary.

FIRST_LENGTH = 2.0  # of the radius
NEW_SHARE = 0.75  # of a move; the rest repeats the move before
GOOD_SHARE = 0.75  # of the steps between two checkpoints that should lower the margin


def apgd(
    model: Classifier,
    images: Tensor,
    labels: Tensor,
    radii: Tensor,
    starts: Tensor,
    steps: int,
    clip: bool = False,
) -> Tensor:
    """As `pgd`: perturbations within `radii` that minimise the smallest margin of `labels`."""
    radii = radii.to(images.dtype).view(-1, 1, 1, 1)
    delta = before = into_reach(starts * radii, images, radii, clip)
    margins, gradient = margins_and_gradient(model, images, labels, delta)
    best, best_gradient = Best(delta), gradient
    best.update(delta, margins)
    lengths = _StepLengths(FIRST_LENGTH * radii, best.margins, checkpoints(steps))
    for step in range(1, steps + 1):
        moved = into_reach(delta - lengths.now * unit(gradient), images, radii, clip)
        move = NEW_SHARE * (moved - delta) + (1 - NEW_SHARE) * (delta - before)
        # The first move has none before it.
        moved = moved if step == 1 else into_reach(delta + move, images, radii, clip)
        before, delta, last = delta, moved, margins
        if step == steps:  # no further move needs a gradient
            best.update(delta, margins_at(model, images, labels, delta))
            break
        margins, gradient = margins_and_gradient(model, images, labels, delta)
        better = best.update(delta, margins)
        best_gradient = _where(better, gradient, best_gradient)
        back = lengths.update(step, margins < last, best.margins)
        # Searches that stall restart at their best point, without momentum.
        delta, before = _where(back, best.delta, delta), _where(back, best.delta, before)
        gradient = _where(back, best_gradient, gradient)
        margins = torch.where(back, best.margins, margins)
    return best.delta


def checkpoints(steps: int) -> list[int]:
    """The steps that review the lengths: the first after 22 %, then more and more often."""
    places, last, place = [], 0, 22
    while place < 100:
        places.append(-(-place * steps // 100))
        last, place = place, place + max(place - last - 3, 6)
    return sorted(set(places))


class _StepLengths:
    """The step length of every image: halved at a checkpoint where its search has stalled."""

    def __init__(self, lengths: Tensor, best: Tensor, places: list[int]) -> None:
        self.now = lengths
        self._places, self._last_place = places, 0
        self._last_best, self._lowered = best, torch.zeros_like(best)
        # As if just halved, so that the first stretch counts by its good steps alone.
        self._last_halved = torch.ones_like(best, dtype=torch.bool)

    def update(self, step: int, lowered: Tensor, best: Tensor) -> Tensor:
        """lowered: which images' margin this step has lowered. Returns which ones are halved."""
        self._lowered = self._lowered + lowered
        if step not in self._places:
            return torch.zeros_like(self._last_halved)
        few = self._lowered < GOOD_SHARE * (step - self._last_place)
        idle = ~self._last_halved & (best >= self._last_best)
        halved = few | idle
        self.now = _where(halved, self.now / 2, self.now)
        self._last_halved, self._last_best = halved, best
        self._lowered, self._last_place = torch.zeros_like(best), step
        return halved


# --------------------------------------------------------------------------------------------------
# Attacks on a certified model: the search runs in float32, the certifier decides.

METHODS = {"pgd": pgd, "apgd": apgd}
# Without clipping no search goes further: a certifier refuses pixels that are far outside [0, 1].
FURTHEST = 15.0
# Points lie this share of the radius inside, and distances count as this much longer than
# computed: rounding must not turn a point on the sphere into a violation.
STRICTLY = 1e-9
ROUNDING = 1e-12
# Bytes of activations that a search keeps at a time.
CPU_MEMORY, GPU_MEMORY = 2**28, 2**33
MAX_BATCH = 256


@dataclass(frozen=True)
class AttackSettings:
    """Every method starts `restarts` times, at random points drawn from (seed, sample)."""

    methods: tuple[str, ...] = ("pgd", "apgd")
    restarts: int = 2
    steps: int = 20
    seed: int = 0

    @property
    def attacks(self) -> list[tuple[str, int]]:
        """All (method, restart), in the order they are tried."""
        return [(method, n) for n in range(self.restarts) for method in self.methods]


@dataclass(frozen=True)
class Targets:
    """Images in the certifier's arithmetic, its labels and radii for them, sample numbers."""

    images: Tensor
    labels: Tensor
    radii: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def only(self, which: Tensor) -> "Targets":
        return Targets(self.images[which], self.labels[which], self.radii[which], self.ids[which])


@dataclass(frozen=True)
class Points:
    """Where attacks got to: attacked images, their labels and float64 distances."""

    targets: Targets
    attacked: Tensor
    labels: Tensor
    distances: Tensor

    @property
    def changed(self) -> Tensor:
        return self.labels != self.targets.labels

    @property
    def violated(self) -> Tensor:
        """Another label inside the radius: the certificate is wrong. A radius of 0 has none."""
        radii = self.targets.radii
        return self.changed & (self.distances * (1 + ROUNDING) <= radii) & (radii > 0)

    def only(self, which: Tensor) -> "Points":
        targets = self.targets.only(which)
        return Points(targets, self.attacked[which], self.labels[which], self.distances[which])

    def columns(self) -> tuple[Tensor, ...]:
        """In the order of `KEPT`."""
        of, labels, distances = self.targets, self.labels, self.distances
        return of.ids, of.images, self.attacked, of.labels, labels, of.radii, distances


class Attacker:
    def __init__(self, certifier: Certifier, settings: AttackSettings) -> None:
        self.certifier, self.settings = certifier, settings
        self.count: Callable[[], object] = lambda: None  # called after each attack
        self.search = deepcopy(certifier.model).requires_grad_(False).float()
        self.device = certifier.model.head.weight.device
        memory = GPU_MEMORY if self.device.type == "cuda" else CPU_MEMORY
        config = certifier.model.config
        # Activations of an image: nine bytes a value and block, more of mixers that are not fused,
        # and a few buffers, in a convolution a copy for each column of the kernel.
        values = (config.image_size // config.patch_size) ** 2 * config.width
        family = self.search.block_groups()[0].family
        columns = family.size if isinstance(family, Convolution) else 0
        of_image = values * ((64 if family else 9) * config.depth + 32 + 16 * columns)
        self.batch = max(1, min(MAX_BATCH, memory // of_image))

    def targets(self, images: Tensor, ids: Tensor) -> Targets:
        """Of images in uint8 or in [0, 1]."""
        images = to_unit_range(images, self.device, self.certifier.dtype)
        parts = [self.certifier(part) for part in images.split(self.batch)]
        labels, radii = (torch.cat(results) for results in zip(*parts, strict=True))
        return Targets(images, labels, radii, ids.to(self.device))

    def attack(
        self, method: str, restart: int, targets: Targets, limits: Tensor, clip: bool
    ) -> Points:
        """One attack on each target, strictly within `limits` (float64, one each)."""
        reach = math.sqrt(targets.images[0].numel()) if clip else FURTHEST
        limits = limits.double().clamp(max=reach)
        searched = [
            self._search(method, restart, targets.only(part), limits[part], clip)
            for part in torch.arange(len(targets), device=self.device).split(self.batch)
        ]
        attacked = torch.cat(searched)
        labels = torch.cat([self.certifier(part)[0] for part in attacked.split(self.batch)])
        distances = (attacked.double() - targets.images.double()).flatten(1).norm(dim=1)
        self.count()
        return Points(targets, attacked, labels, distances)

    def _search(
        self, method: str, restart: int, targets: Targets, limits: Tensor, clip: bool
    ) -> Tensor:
        """Attacked images in the certifier's arithmetic."""
        images, settings = targets.images.float(), self.settings
        stream = list(METHODS).index(method)
        starts = random_starts(images[0].shape, settings.seed, targets.ids, restart, stream)
        search, labels = METHODS[method], targets.labels
        delta = search(
            self.search, images, labels, limits, starts.to(images), settings.steps, clip
        ).double()
        # Made in float64, strictly inside.
        lengths = delta.flatten(1).norm(dim=1).clamp_min(1e-300)
        factors = (limits * (1 - STRICTLY) / lengths).clamp(max=1)
        attacked = targets.images.double() + delta * factors.view(-1, 1, 1, 1)
        return (attacked.clamp(0, 1) if clip else attacked).to(targets.images.dtype)


# --------------------------------------------------------------------------------------------------
# What attacks are for.

INSIDE = 0.9999
GROWTH, FURTHEST_FACTOR, BISECTIONS = 1.25, 20.0, 8
SMALLEST_SEARCH = 1 / 255


def hunt(attacker: Attacker, targets: Targets, inside: float = INSIDE) -> list[Points]:
    """Attack each target at `inside` of its radius with everything; returns the violations.

    Not clipped to [0, 1]: the certificate covers the whole ball. A radius of 0 certifies nothing,
    so it is not attacked.
    """
    targets, violations = targets.only(targets.radii > 0), []
    for method, restart in attacker.settings.attacks if len(targets) else []:
        points = attacker.attack(method, restart, targets, inside * targets.radii, clip=False)
        violations.append(points.only(points.violated))
    return violations


def robust_at(
    attacker: Attacker, targets: Targets, correct: Tensor, epsilons: tuple[float, ...]
) -> tuple[Tensor, Tensor, list[Points]]:
    """Which targets keep their label under every attack within ε, with pixels in [0, 1].

    Returns by ε and target [E, N] whether it is robust and how many attacks were run on it; and
    the violations. correct: which ones the model has right; others are broken. A target that breaks
    at an ε is broken at every larger one, and one that is certified at ε is robust there: neither
    is attacked. (`hunt` attacks the latter.)
    """
    attacks = torch.zeros(len(epsilons), len(targets), dtype=torch.int64, device=attacker.device)
    robust, unbroken, violations = attacks.bool(), correct.clone(), []
    for row in sorted(range(len(epsilons)), key=epsilons.__getitem__):
        uncertified = targets.radii < epsilons[row]
        for method, restart in attacker.settings.attacks:
            (chosen,) = (unbroken & uncertified).nonzero(as_tuple=True)
            if not len(chosen):
                break
            limits = torch.full_like(targets.radii[chosen], epsilons[row])
            points = attacker.attack(method, restart, targets.only(chosen), limits, clip=True)
            attacks[row, chosen] += 1
            unbroken[chosen[points.changed]] = False
            # A change inside the radius is a violation here too.
            violations.append(points.only(points.violated))
        robust[row] = unbroken
    return robust, attacks, violations


def nearest_change(attacker: Attacker, target: Targets) -> Points | None:
    """The smallest change found of one image's label, with pixels in [0, 1]; None if none.

    The attack's radius grows from the certified one until it succeeds, and is then bisected.
    """

    def within(limit: float) -> Points | None:
        for method, restart in attacker.settings.attacks:
            limits = torch.full_like(target.radii, limit)
            points = attacker.attack(method, restart, target, limits, clip=True)
            if points.changed.item():
                return points
        return None

    failed, found = target.radii.item(), None
    limit = max(failed, SMALLEST_SEARCH)
    # Beyond the diagonal of [0, 1] there is nothing new.
    last = min(limit * FURTHEST_FACTOR, math.sqrt(target.images.numel()))
    while found is None and limit < last:
        limit *= GROWTH
        found = within(limit)
        failed = limit if found is None else failed
    for _ in range(BISECTIONS):
        if found is None:
            return None
        limit = (failed + found.distances.item()) / 2
        nearer = within(limit)
        found, failed = (found, limit) if nearer is None else (nearer, failed)
    return found


PICTURED = (0.1, 0.4, 0.6, 0.9)  # positions in the order of radii


def examples(attacker: Attacker, results: Arrays, image: Callable[[int], np.ndarray]) -> Arrays:
    """`point_arrays` of the nearest changes found of some right predictions, by radius."""
    right = (results["labels"] == results["predictions"]) & (results["radii"] > 0)
    (rows,) = right.nonzero()
    rows = rows[results["radii"][rows].argsort(kind="stable")]
    places = sorted({int(len(rows) * share) for share in PICTURED}) if len(rows) else []
    found = []
    for sample in results["samples"][rows[places]].tolist():
        pixels = torch.from_numpy(image(sample)).permute(2, 0, 1)[None]
        points = nearest_change(attacker, attacker.targets(pixels, torch.tensor([sample])))
        found += [points] if points is not None else []
    return point_arrays(found) if found else {}


# --------------------------------------------------------------------------------------------------
# attack.json and its table; violations.npz and attacked.npz hold what `point_arrays` makes.

KEPT = ("samples", "images", "attacked", "labels", "predictions", "radii", "distances")


def point_arrays(found: list[Points]) -> Arrays:
    """Of each sample its first point, by sample number; labels: those before the attack."""
    columns = zip(*(points.columns() for points in found), strict=True)
    joined = [torch.cat(parts).cpu().numpy() for parts in columns]
    _, first = np.unique(joined[0], return_index=True)
    return {name: array[first] for name, array in zip(KEPT, joined, strict=True)}


def attack_batch(
    attacker: Attacker,
    inside: float,
    epsilons: tuple[float, ...],
    batch: TestBatch,
    reach: Callable[[float], None],
) -> Arrays:
    """Both questions (docs/attack.md) for a batch: a row per sample, and the violations."""
    attacks_at_most = len(attacker.settings.attacks) * (1 + len(epsilons))
    shares = (number / attacks_at_most for number in range(1, attacks_at_most + 1))
    attacker.count = lambda: reach(next(shares))
    targets = attacker.targets(batch.images, batch.ids)
    violations = hunt(attacker, targets, inside)
    hunted = (targets.radii > 0) * len(attacker.settings.attacks)

    correct = targets.labels == batch.labels.to(attacker.device)
    robust, attacks, further = robust_at(attacker, targets, correct, epsilons)
    # A first part without a sample: there may be no other.
    none = Points(targets, targets.images, targets.labels, targets.radii)
    kept = point_arrays([none.only(targets.ids < 0), *violations, *further])
    return {
        "samples": batch.ids.numpy(),
        "labels": batch.labels.numpy(),
        "predictions": targets.labels.cpu().numpy(),
        "radii": targets.radii.cpu().numpy(),
        "hunt_attacks": hunted.cpu().numpy(),
        "robust": robust.mT.cpu().numpy(),
        "robust_attacks": attacks.mT.cpu().numpy(),
        **{f"violation_{name}": array for name, array in kept.items()},
    }


def attack_json(
    results: Arrays,
    epsilons: tuple[float, ...],
    settings: dict[str, Any],
    name: Callable[[int], str],
) -> dict[str, Any]:
    """results: of `attack_batch`, for all samples. name: of a sample number."""
    samples = SampleResults(results["labels"], results["predictions"], results["radii"])
    hunted, total = int(results["hunt_attacks"].sum()), len(samples)
    radii = {}
    for row, epsilon in enumerate(epsilons):
        robust, tried = int(results["robust"][:, row].sum()), results["robust_attacks"][:, row]
        radii[repr(epsilon)] = {
            "certified": samples.share(epsilon),
            "robust": robust / total,
            "interval": list(wilson_interval(robust, total)),
            "attacked": int((tried > 0).sum()),
            "attacks": int(tried.sum()),
        }
    keys = ("samples", "radii", "distances", "labels", "predictions")
    violations = zip(*(results[f"violation_{key}"].tolist() for key in keys), strict=True)
    return {
        "clean_accuracy": samples.share(),
        "radii": radii,
        "violations": [
            {
                "sample": sample,
                "name": name(sample),
                "radius": radius,
                "distance": distance,
                "label_before": before,
                "label_after": after,
            }
            for sample, radius, distance, before, after in violations
        ],
        "attacked": total,
        "attacks": hunted + int(results["robust_attacks"].sum()),
        "attacks_inside_the_radius": hunted,
        **settings,
    }


def attack_table(found: dict[str, Any]) -> str:
    """attack.json for a terminal."""
    lines = [f"  {'':16}{'certified':>11}{'under attack':>14}   95 % interval"]
    clean = found["clean_accuracy"]
    lines.append(f"  {'clean':16}{clean:>11.2%}{clean:>14.2%}")
    for epsilon, shares in found["radii"].items():
        low, high = shares["interval"]
        lines.append(
            f"  {'ε = ' + radius_name(float(epsilon)):16}{shares['certified']:>11.2%}"
            f"{shares['robust']:>14.2%}   {low:.2%} to {high:.2%}"
        )
    lines += [
        f"  {found['attacked']:,} samples, {found['attacks_inside_the_radius']:,} attacks at "
        f"{found['inside']:g} of the radius; samples that change inside it: "
        f"{len(found['violations'])}",
        f"  {' and '.join(found['methods'])}, {found['restarts']} restarts of {found['steps']} "
        f"steps; K = {found['lipschitz_bound']:.9f}"
        f"{' (assumed)' if found['lipschitz_assumed'] else ''}, {found['arithmetic']}",
    ]
    return "\n".join(lines)
