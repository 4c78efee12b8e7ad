"""Attacks on a certified model: searched for in float32, believed as the certifier sees them."""

import math
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipnext_scale.attack.apgd import apgd
from lipnext_scale.attack.pgd import Classifier, pgd
from lipnext_scale.attack.starts import random_starts
from lipnext_scale.certify import Certifier
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.models.blocks import matrix_list

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
