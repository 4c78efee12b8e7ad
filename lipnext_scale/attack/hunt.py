"""What attacks are for: to look for a wrong certificate, for robust accuracy, for pictures."""

import math
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipnext_scale.attack.methods import Classifier, apgd, pgd, random_starts
from lipnext_scale.certify import Certifier
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.models.blocks import matrix_list

# --------------------------------------------------------------------------------------------------
# Attacks on a certified model: searched for in float32, believed as the certifier sees them.

METHODS = {"pgd": pgd, "apgd": apgd}
# Without clipping no search goes further: a certifier refuses pixels that are no image's.
FURTHEST = 15.0
# Points are put this share of the radius inside, and distances are taken this much longer than
# computed: rounding must not make a violation of a point on the sphere.
STRICTLY = 1e-9
ROUNDING = 1e-12
# Bytes of activations that a search keeps at a time.
CPU_MEMORY, GPU_MEMORY = 2**28, 2**33
MAX_BATCH = 256


@dataclass(frozen=True)
class AttackSettings:
    """Every method begins `restarts` times, at random points drawn from (seed, sample)."""

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
    """Where attacks got to: attacked images, the labels and float64 distances they have."""

    targets: Targets
    attacked: Tensor
    labels: Tensor
    distances: Tensor

    @property
    def changed(self) -> Tensor:
        return self.labels != self.targets.labels

    @property
    def violated(self) -> Tensor:
        """Another label inside the radius: the certificate is wrong. A radius of 0 claims none."""
        radii = self.targets.radii
        return self.changed & (self.distances * (1 + ROUNDING) <= radii) & (radii > 0)

    def only(self, which: Tensor) -> "Points":
        targets = self.targets.only(which)
        return Points(targets, self.attacked[which], self.labels[which], self.distances[which])


class Attacker:
    """search: the certifier's model in float32 from `search_copy`, if it was made before."""

    def __init__(
        self,
        certifier: Certifier,
        settings: AttackSettings | None = None,
        search: LipNeXt | None = None,
    ) -> None:
        self.certifier, self.settings = certifier, settings or AttackSettings()
        self.search = search or search_copy(certifier.model)
        self.device = certifier.model.head.weight.device
        memory = GPU_MEMORY if self.device.type == "cuda" else CPU_MEMORY
        self.batch = images_at_once(certifier.model.config, memory)

    def targets(self, images: Tensor, ids: Tensor) -> Targets:
        """Of images in uint8 or in [0, 1]."""
        images, dtype = images.to(self.device), self.certifier.dtype
        images = images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)
        parts = [self.certifier(part) for part in images.split(self.batch)]
        labels, radii = (torch.cat(results) for results in zip(*parts, strict=True))
        return Targets(images, labels, radii, ids.to(self.device))

    def attack(
        self, method: str, restart: int, targets: Targets, limits: Tensor, clip: bool
    ) -> Points:
        """One attack on each target, strictly within `limits` (float64, one each)."""
        reach = math.sqrt(targets.images[0].numel()) if clip else FURTHEST
        limits = limits.double().clamp(max=reach)
        attacked = torch.empty_like(targets.images)
        for part in torch.arange(len(targets), device=self.device).split(self.batch):
            found = self._search(method, restart, targets.only(part), limits[part], clip)
            attacked[part] = found
        return self.look(targets, attacked)

    def look(self, targets: Targets, attacked: Tensor) -> Points:
        """What the certified arithmetic says of attacked images."""
        labels = torch.cat([self.certifier(part)[0] for part in attacked.split(self.batch)])
        distances = (attacked.double() - targets.images.double()).flatten(1).norm(dim=1)
        return Points(targets, attacked, labels, distances)

    def _search(
        self, method: str, restart: int, targets: Targets, limits: Tensor, clip: bool
    ) -> Tensor:
        """Attacked images in the certifier's arithmetic."""
        images, settings = targets.images.float(), self.settings
        stream = list(METHODS).index(method)
        starts = random_starts(images[0].shape, settings.seed, targets.ids, restart, stream)
        model: Classifier = self.search
        found = METHODS[method](
            model, images, targets.labels, limits, starts.to(images), settings.steps, clip
        )
        return as_certified(targets.images, found.double(), limits, clip)


def as_certified(images: Tensor, delta: Tensor, limits: Tensor, clip: bool) -> Tensor:
    """images + delta, made in float64 and again strictly within `limits`, in the images' type."""
    lengths = delta.flatten(1).norm(dim=1).clamp_min(1e-300)
    factors = (limits * (1 - STRICTLY) / lengths).clamp(max=1)
    attacked = images.double() + delta * factors.view(-1, 1, 1, 1)
    return (attacked.clamp(0, 1) if clip else attacked).to(images.dtype)


@torch.no_grad()
def search_copy(model: LipNeXt) -> LipNeXt:
    """The model to search with: float32, no gradients of weights, every M·Rᵀ multiplied once."""
    search = deepcopy(model).requires_grad_(False)
    for group in search.block_groups():
        if group.spec.parametrisation == "product":
            matrices = matrix_list(group.orthogonal_weights())
            for index, (_, weight) in enumerate(group.layers()):
                matrices[2 * index + 1].copy_(weight)
            group.spec = replace(group.spec, parametrisation="merged")
    return search.float().eval()


def images_at_once(config: LipNeXtConfig, memory: int) -> int:
    """How many images' activations fit: nine bytes a value and block, and a few buffers."""
    tokens = (config.image_size // config.patch_size) ** 2
    each = tokens * config.width * (9 * config.depth + 32)
    return max(1, min(MAX_BATCH, memory // each))


INSIDE = 0.9999
GROWTH, FURTHEST_FACTOR, BISECTIONS = 1.25, 20.0, 4
SMALLEST_LOOK = 1 / 255
FRACTIONS = 32


def hunt(attacker: Attacker, targets: Targets, inside: float = INSIDE) -> list[Points]:
    """Attack each target at `inside` of its radius with everything; the violations that are found.

    Not clipped to [0, 1]: the certificate speaks of the whole ball. A radius of 0 is no claim, and
    there is nothing to attack.
    """
    targets, violations = targets.only(targets.radii > 0), []
    for method, restart in attacker.settings.attacks if len(targets) else []:
        points = attacker.attack(method, restart, targets, inside * targets.radii, clip=False)
        violations.append(points.only(points.violated))
    return violations


@dataclass(frozen=True)
class Robustness:
    """By ε and target [E, N]: no attack changed it; how many attacks were run on it."""

    robust: Tensor
    attacks: Tensor
    violations: list[Points]


def robust_at(attacker: Attacker, targets: Targets, epsilons: tuple[float, ...]) -> Robustness:
    """Which targets keep their label under every attack within ε, with pixels in [0, 1].

    targets: those that the model has right. One that broke at an ε is broken at every larger one,
    and one that is certified at ε is robust there: neither is attacked. (`hunt` attacks the latter
    all the same.)
    """
    shape = (len(epsilons), len(targets))
    robust = torch.ones(shape, dtype=torch.bool, device=attacker.device)
    attacks = torch.zeros(shape, dtype=torch.int64, device=attacker.device)
    whole = torch.ones(len(targets), dtype=torch.bool, device=attacker.device)
    violations = []
    for row in sorted(range(len(epsilons)), key=epsilons.__getitem__):
        open_question = targets.radii < epsilons[row]
        for method, restart in attacker.settings.attacks:
            (chosen,) = (whole & open_question).nonzero(as_tuple=True)
            if not len(chosen):
                break
            limits = torch.full_like(targets.radii[chosen], epsilons[row])
            points = attacker.attack(method, restart, targets.only(chosen), limits, clip=True)
            attacks[row, chosen] += 1
            whole[chosen[points.changed]] = False
            # A change so near is wrong whoever finds it.
            violations.append(points.only(points.violated))
        robust[row] = whole
    return Robustness(robust, attacks, violations)


@dataclass(frozen=True)
class AttackExample:
    """An image [C, H, W] and the nearest image found that has another label."""

    sample: int
    image: Tensor
    attacked: Tensor
    distance: float
    radius: float
    label_before: int
    label_after: int


def nearest_change(
    certifier: Certifier,
    image: Tensor,
    label: int,
    radius: float,
    sample: int = 0,
    settings: AttackSettings | None = None,
    search: LipNeXt | None = None,
) -> AttackExample | None:
    """The smallest perturbation found that changes an image's label; None if none was found.

    image: [C, H, W], uint8 or in [0, 1]; label, radius: as the certifier gives them. The attack's
    radius grows from the certified one until it succeeds, and is then bisected. search: what
    `search_copy` makes, to make it once for several images.
    """
    attacker = Attacker(certifier, settings or AttackSettings(("apgd",), restarts=1), search)
    target = attacker.targets(image[None], torch.tensor([sample]))
    assert target.labels.item() == label, "the certifier has another label for this image"
    limit = max(radius, SMALLEST_LOOK)
    # Beyond the diagonal of [0, 1] there is nothing new.
    last = min(limit * FURTHEST_FACTOR, math.sqrt(image.numel()))
    failed, found = radius, None
    while found is None and limit < last:
        limit *= GROWTH
        found = _nearest_within(attacker, target, limit)
        failed = limit if found is None else failed
    if found is None:
        return None
    for _ in range(BISECTIONS):
        failed = min(failed, found.distances.item())
        limit = (failed + found.distances.item()) / 2
        nearer = _nearest_within(attacker, target, limit)
        found, failed = (found, limit) if nearer is None else (nearer, failed)
    return _example(found, radius)


def _nearest_within(attacker: Attacker, target: Targets, limit: float) -> Points | None:
    """The nearest change on the way from the image to where an attack got; None if it got none."""
    limits = torch.full_like(target.radii, limit)
    for method, restart in attacker.settings.attacks:
        points = attacker.attack(method, restart, target, limits, clip=True)
        if not points.changed.item():
            continue
        fractions = torch.arange(1, FRACTIONS + 1, device=attacker.device) / FRACTIONS
        steps = fractions.to(target.images).view(-1, 1, 1, 1) * (points.attacked - target.images)
        repeated = target.only(torch.zeros(FRACTIONS, dtype=torch.int64, device=attacker.device))
        way = attacker.look(repeated, target.images + steps)
        # The end itself is changed, up to the rounding of another batch.
        changed = way.only(way.changed)
        return changed.only(torch.tensor([0])) if len(changed.labels) else points
    return None


def _example(found: Points, radius: float) -> AttackExample:
    return AttackExample(
        sample=int(found.targets.ids.item()),
        image=found.targets.images[0].cpu(),
        attacked=found.attacked[0].cpu(),
        distance=found.distances.item(),
        radius=radius,
        label_before=int(found.targets.labels.item()),
        label_after=int(found.labels.item()),
    )
