"""LipNeXt (paper §3.3): stem, blocks in banks, L2 pooling, a head with normalised rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import blocks
from lipnext_scale.models.blocks import BlockSpec, Matrices, group_reference, mixed_group
from lipnext_scale.models.fused import fused_group
from lipnext_scale.models.layers import (
    CONVOLUTIONS,
    FAMILIES,
    Convolution,
    Gated,
    LayerName,
    Linear,
    convolution,
)
from lipnext_scale.models.layers.conv import LARGEST_GRID, ORTHOGONAL
from lipnext_scale.models.neck import Neck, square_side
from lipnext_scale.utils.config import ConfigError, changeable

# --------------------------------------------------------------------------------------------------
# A group of LipNeXt blocks: the unit of sharding, compiling and recomputing.

WeightLayout = Literal["bank", "row"]
Blocks = Tensor | tuple[Tensor, Tensor]  # Z, or (Z, a bound of its Lipschitz constant)


class BlockGroup(nn.Module):
    """The blocks [first, first + count) of a network.

    Their orthogonal matrices, R and W of each block in turn, are
        layout bank: one parameter, bank [count, 2, C, C], so that a shard is some whole pairs;
        layout row:  a parameter [C, C] each, `matrices`, so that a shard is some rows of each.
    A layer other than manifold has the free parameters of its family instead, by name, `free`
    [count, 2, …]. frozen: what is made of them (`freeze`), which for a linear family is a bank.
    bias [count, C], pos [count, H, W, 1].
    """

    def __init__(
        self,
        first: int,
        count: int,
        width: int,
        tokens: tuple[int, int],
        spec: BlockSpec,
        has_pos: bool,
        layout: WeightLayout = "bank",
        layer: LayerName = "manifold",
        kernel_size: int = 1,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.first, self.count, self.spec, self.frozen = first, count, spec, frozen
        family = FAMILIES.get(layer) if kernel_size == 1 else convolution(layer, tokens[0])
        self.family = None if frozen and isinstance(family, Linear) else family
        if self.family is not None:
            shapes = self.family.made_shapes(width) if frozen else self.family.shapes(width)
            free = {n: nn.Parameter(torch.empty(count, 2, *s)) for n, s in shapes.items()}
            self.free = nn.ParameterDict(free)
        elif layout == "bank":
            self.bank = nn.Parameter(torch.empty(count, 2, width, width))
        else:
            self.matrices = nn.ParameterList(torch.empty(width, width) for _ in range(2 * count))
        self.bias = nn.Parameter(torch.empty(count, width))
        self.pos = nn.Parameter(torch.empty(count, *tokens, 1)) if has_pos else None
        # Set from outside: recompute the activations in the backward pass instead of keeping them;
        # compute in another type than the parameters have (FSDP casts by itself).
        self.recompute = False
        self.compute_dtype: torch.dtype | None = None

    @property
    def layout(self) -> WeightLayout:
        return "bank" if "bank" in self._parameters else "row"

    def orthogonal_weights(self) -> Matrices:
        return self.bank if self.layout == "bank" else list(self.matrices)

    def orthogonal_parameters(self) -> list[nn.Parameter]:
        """The parameters that hold the matrices; none where free ones do."""
        if self.family is not None:
            return []
        return [self.bank] if self.layout == "bank" else list(self.matrices)

    def made(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What the mixers compute with [count, 2, …], made of the free parameters in this type."""
        assert self.family is not None
        free = {name: parameter.to(dtype) for name, parameter in self.free.items()}
        return free if self.frozen else self.family.made(free)

    def forward(self, x: Tensor) -> Blocks:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._blocks, x, use_reentrant=False, preserve_rng_state=False)
        return self._blocks(x)

    def _blocks(self, x: Tensor) -> Blocks:
        x, bias, family = self._cast(x), self._cast(self.bias), self.family
        pos = None if self.pos is None else self._cast(self.pos)
        if family is None:
            weights = self.orthogonal_weights()
            weights = (
                self._cast(weights)
                if isinstance(weights, Tensor)
                else [self._cast(w) for w in weights]
            )
            return _fast_group(x, weights, bias, pos, self.spec)
        made = self.made(torch.promote_types(bias.dtype, torch.float32))
        if isinstance(family, Gated | Convolution):
            parts = {
                n: (t if t.is_complex() else t.to(bias.dtype)).flatten(0, 1).unbind(0)
                for n, t in made.items()
            }
            of_mixers = zip(*parts.values(), strict=True)
            mixers = [partial(family.mix, dict(zip(parts, m, strict=True))) for m in of_mixers]
            z = mixed_group(x, mixers, bias, pos, self.spec)
        else:
            z = _fast_group(x, made["matrix"].to(bias.dtype), bias, pos, self.spec)
        norm = None if self.frozen else family.norm
        return z if norm is None else (z, norm(made).prod())

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.compute_dtype is None else tensor.to(self.compute_dtype)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """R uniform on O(C), W = Rᵀ (so M = W·R = I), b = 0, pos = 0."""
        self.bias.zero_()
        if self.pos is not None:
            self.pos.zero_()
        if self.family is not None:
            self.fill_free(dict(self.free.items()), 0, seed)
            return
        for index, matrix in enumerate(blocks.matrix_list(self.orthogonal_weights())):
            matrix.copy_(self.initial_matrix(index, seed, matrix))

    def initial_matrix(self, index: int, seed: int, like: Tensor) -> Tensor:
        """The first value of the group's matrix `index`, on the device and in the type of `like`.

        It comes from (seed, block) alone: the start does not depend on how blocks are grouped, how
        matrices are laid out or on which process they live.
        """
        generator = self._generator(index // 2, seed)
        rotation = random_orthogonal(like.shape[-1], generator, like.dtype, like.device)
        return rotation.mT if index % 2 else rotation

    @torch.no_grad()
    def fill_free(self, free: Mapping[str, Tensor], start: int, seed: int) -> None:
        """The first values of free parameters, or of those of the blocks from `start` on."""
        assert self.family is not None and not self.frozen
        for index in range(min(map(len, free.values()))):
            generator = self._generator(start + index, seed)
            for name, value in self.family.initial(self.bias.shape[-1], generator).items():
                free[name][index].copy_(value)

    def _generator(self, index: int, seed: int) -> torch.Generator:
        block = self.first + index
        return torch.Generator().manual_seed((seed * 1_000_003 + block) % 2**63)


def _fast_group(
    x: Tensor, matrices: Matrices, bias: Tensor, pos: Tensor | None, spec: BlockSpec
) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler fuses the plain form itself
        return group_reference(x, matrices, bias, pos, spec)
    return fused_group(x, matrices, bias, pos, spec)


@dataclass(frozen=True)
class LipNeXtConfig:
    """The architecture; everything that the paper varies is a field."""

    RETIRED: ClassVar = {"parametrisation": ...}  # it is the optimizer's now
    depth: int = 32
    width: int = 1024
    image_size: int = 32
    patch_size: int = 2
    in_channels: int = 3
    num_classes: int = 10
    shift_ratio: float = 1 / 16
    padding: Literal["circular", "zero"] = "circular"
    positional_embedding: bool = True
    activation: Literal["beta_abs", "minmax"] = "beta_abs"
    beta: float = 0.75
    # How the channel mixers are 1-Lipschitz: docs/layers.md.
    layer: LayerName = "manifold"
    # 3: the mixers are 3×3 convolutions, where the layer has one; the shift is then left out.
    kernel_size: int = 1
    # From tokens to features: L2 pooling, or LiResNet's dense layers (models/neck.py), which give
    # neck_width features and have neck_depth further layers.
    neck: Literal["l2_pool", "dense"] = "l2_pool"
    neck_width: int = 256
    neck_depth: int = 0
    # The head's rows: of length 1, or of any, whose length is then a learned scale of the logits.
    head: Literal["unit", "free"] = "unit"
    # Blocks in a group, the unit of sharding. 0: the engine chooses; without one, all in one.
    blocks_per_bank: int = changeable(0)

    def __post_init__(self) -> None:
        for key in ("depth", "width", "image_size", "patch_size", "in_channels"):
            if not 1 <= getattr(self, key) < 2**31:
                raise ConfigError(key, getattr(self, key), "must be at least 1 and below 2³¹")
        if not 2 <= self.num_classes < 2**31:
            raise ConfigError("num_classes", self.num_classes, "must be at least 2 and below 2³¹")
        if self.image_size % self.patch_size:
            raise ConfigError(
                "patch_size", self.patch_size, f"must divide image_size = {self.image_size}"
            )
        if self.width < self.stem_channels:
            raise ConfigError(
                "width",
                self.width,
                f"must be at least in_channels·patch_size² = {self.stem_channels}",
            )
        if not 0 <= self.shift_ratio <= 0.25:
            raise ConfigError("shift_ratio", self.shift_ratio, "must be in [0, 1/4]")
        if not 0 <= self.beta <= 1:
            raise ConfigError("beta", self.beta, "must be in [0, 1]")
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ConfigError(key, getattr(self, key), f"must be one of {', '.join(choices)}")
        for key in ("width", "neck_width"):
            if self.activation == "minmax" and getattr(self, key) % 2:
                raise ConfigError(key, getattr(self, key), "must be even for activation minmax")
        self._check_kernel()
        self._check_neck()
        if not 0 <= self.blocks_per_bank <= self.depth:
            raise ConfigError(
                "blocks_per_bank",
                self.blocks_per_bank,
                f"must be 0 (automatic) to depth = {self.depth}",
            )

    def _check_kernel(self) -> None:
        if self.kernel_size == 1:
            return
        if self.kernel_size != 3:
            raise ConfigError("kernel_size", self.kernel_size, "must be 1 or 3")
        if self.layer not in CONVOLUTIONS:
            right = f"must be 1 for layer {self.layer!r}; 3 needs one of {', '.join(CONVOLUTIONS)}"
            raise ConfigError("kernel_size", 3, right)
        if self.padding != "circular":
            raise ConfigError("padding", self.padding, "must be circular for kernel_size 3")
        if self.layer in ORTHOGONAL and self.side > LARGEST_GRID:
            most = f"{LARGEST_GRID}×{LARGEST_GRID} tokens, not {self.side}×{self.side}"
            right = f"must leave at most {most}: a kernel of layer {self.layer!r} reaches them all"
            raise ConfigError("patch_size", self.patch_size, right)

    def _check_neck(self) -> None:
        if self.neck == "l2_pool":
            return
        most = (self.side // square_side(self.side)) ** 2 * self.width
        if not 1 <= self.neck_width <= most:
            squares = f"{self.side}×{self.side} tokens of width {self.width}"
            right = f"must be 1 to {most} for {squares}"
            raise ConfigError("neck_width", self.neck_width, right)
        if not 0 <= self.neck_depth < 2**31:
            raise ConfigError("neck_depth", self.neck_depth, "must be at least 0")

    def require_radius(self, key: str, radius: float) -> None:
        """A larger one reaches every image; a whole number is one without its 255."""
        largest = self.image_size * math.sqrt(self.in_channels)
        if radius > largest or (radius >= 8 and radius == int(radius)):
            right = f"must be a distance of pixels in [0, 1], which is {largest:.3g} at most; "
            raise ConfigError(key, radius, right + "such as 36/255")

    @property
    def side(self) -> int:
        """Of the grid of tokens."""
        return self.image_size // self.patch_size

    @property
    def stem_channels(self) -> int:
        return self.in_channels * self.patch_size**2

    @property
    def bank_parameters(self) -> int:
        """2·L·W²: the parameters in orthogonal matrices, the paper's count; or those in kernels."""
        return 2 * self.depth * self.width**2 * self.kernel_size**2

    @property
    def features(self) -> int:
        """That the head sees."""
        return self.width if self.neck == "l2_pool" else self.neck_width

    @property
    def dense_products(self) -> int:
        """Multiplications behind the blocks for an image."""
        head = self.features * self.num_classes
        if self.neck == "l2_pool":
            return head
        joint = (self.side // square_side(self.side)) ** 2 * self.width
        vector = self.neck_width * (joint + self.neck_depth * self.neck_width)
        return (self.side * self.width) ** 2 + vector + head


_CHOICES = {
    "layer": get_args(LayerName),
    "padding": ("circular", "zero"),
    "activation": ("beta_abs", "minmax"),
    "neck": ("l2_pool", "dense"),
    "head": ("unit", "free"),
}


class Head(nn.Module):
    """logits = w·f + b, computed in float32 or better; unit: with the rows of w normalised."""

    def __init__(self, width: int, num_classes: int, unit: bool = True) -> None:
        super().__init__()
        self.shape = num_classes, width  # of the whole weight, of which a process may hold less
        self.unit = unit
        self.weight = nn.Parameter(torch.empty(self.shape))
        self.bias = nn.Parameter(torch.empty(num_classes))

    def rows(self) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return F.normalize(self.weight.to(dtype), dim=-1) if self.unit else self.weight.to(dtype)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, rows): the losses need both, and sharded rows exist only in here."""
        weight = self.rows()
        logits = F.linear(features.to(weight.dtype), weight, self.bias.to(weight.dtype))
        return logits, weight

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        self.weight.copy_(self.initial_weight(seed))
        self.bias.zero_()

    def initial_weight(self, seed: int) -> Tensor:
        """Always drawn on the CPU, as `random_orthogonal`. Free rows begin with length 1."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + 999_983) % 2**63)
        weight = torch.randn(self.shape, generator=generator, device="cpu")
        return weight if self.unit else F.normalize(weight, dim=-1)


class LipNeXt(nn.Module):
    """NCHW images in [0, 1] → logits. `features` is K-Lipschitz, K the product of spectral norms.

    Built under `torch.device("meta")` it allocates nothing; `reset_parameters` fills it later.
    seed: of the initial weights; None draws one from torch's global generator.
    layout, frozen: how the matrices of a group are parameters, see `BlockGroup`.
    """

    def __init__(
        self,
        config: LipNeXtConfig,
        seed: int | None = None,
        layout: WeightLayout = "bank",
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        shift_ratio = config.shift_ratio if config.kernel_size == 1 else 0.0
        spec = BlockSpec(
            shift_part=blocks.shift_width(config.width, shift_ratio),
            padding=config.padding,
            activation=config.activation,
            beta=config.beta,
        )
        per_bank = config.blocks_per_bank or config.depth
        self.groups = nn.ModuleList(
            BlockGroup(
                first,
                min(per_bank, config.depth - first),
                config.width,
                (config.side, config.side),
                spec,
                config.positional_embedding,
                layout,
                config.layer,
                config.kernel_size,
                frozen,
            )
            for first in range(0, config.depth, per_bank)
        )
        neck = (config.side, config.width, config.neck_width, config.neck_depth, spec, frozen)
        self.neck = None if config.neck == "l2_pool" else Neck(*neck)
        self.head = Head(config.features, config.num_classes, config.head == "unit")
        if not self.head.weight.is_meta:
            self.reset_parameters(int(torch.randint(2**31, ())) if seed is None else seed)

    def block_groups(self) -> list[BlockGroup]:
        """The groups of blocks in order: the units that an engine shards."""
        return list(self.groups)  # type: ignore[arg-type]

    def reset_parameters(self, seed: int) -> None:
        """Fill all weights from a seed; the same values for every grouping of the blocks."""
        for group in self.block_groups():
            group.reset_parameters(seed)
        if self.neck is not None:
            self.neck.reset_parameters(seed)
        self.head.reset_parameters(seed)

    def features(self, images: Tensor) -> Tensor:
        """[N, width] or [N, neck_width]; the certificate is about their l2 distances."""
        return self._features(images)[0]

    def _features(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """(features, a bound of K where it is not 1 by construction)."""
        self._check_images(images)
        x = blocks.space_to_depth(images - 0.5, self.config.patch_size, self.config.width)
        lipschitz: Tensor | None = None
        for group in self.block_groups():
            x = group(x)
            if isinstance(x, tuple):
                x, norm = x
                lipschitz = norm if lipschitz is None else lipschitz * norm
        return (blocks.l2_pool(x) if self.neck is None else self.neck(x)), lipschitz

    def forward(self, images: Tensor, with_head: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The logits; with `with_head` (logits, the head's rows).

        Rows are K times as long where K is not 1 by construction: losses and radii then see
        K·‖w_i - w_j‖.
        """
        features, lipschitz = self._features(images)
        logits, weight = self.head(features)
        if not with_head:
            return logits
        return logits, (weight if lipschitz is None else weight * lipschitz)

    def _check_images(self, images: Tensor) -> None:
        side, channels = self.config.image_size, self.config.in_channels
        if images.dim() != 4 or tuple(images.shape[1:]) != (channels, side, side):
            raise ValueError(
                f"images of shape {tuple(images.shape)}: "
                f"this model takes [N, {channels}, {side}, {side}]"
            )
        if len(images) == 0:
            raise ValueError(f"images of shape {tuple(images.shape)}: there are none")
        if not images.is_floating_point():
            raise ValueError(
                f"images are {images.dtype}: this model takes floating point in [0, 1]"
            )


def is_frozen(model: LipNeXt) -> bool:
    """All matrices are stored, none is made of free parameters."""
    groups = all(group.family is None or group.frozen for group in model.block_groups())
    return groups and (model.neck is None or model.neck.frozen)


@torch.no_grad()
def freeze(model: LipNeXt) -> LipNeXt:
    """The same network with stored matrices: made of free parameters once, in float64, rounded to
    the model's type. This is what is exported, attacked and certified."""
    if is_frozen(model):
        return model
    weight = model.head.weight
    with torch.device("meta"):
        frozen = LipNeXt(model.config, frozen=True)
    frozen = frozen.to_empty(device=weight.device).to(weight.dtype).train(model.training)
    frozen.head.load_state_dict(model.head.state_dict())
    if frozen.neck is not None and model.neck is not None:
        frozen.neck.store(model.neck)
    for group, still in zip(model.block_groups(), frozen.block_groups(), strict=True):
        still.bias.copy_(group.bias)
        if still.pos is not None and group.pos is not None:
            still.pos.copy_(group.pos)
        if group.family is None:
            matrices = blocks.matrix_list(group.orthogonal_weights())
            still.bank.copy_(torch.stack([*matrices]).view_as(still.bank))
            continue
        made = group.made(torch.float64)
        if still.family is None:
            still.bank.copy_(made["matrix"])
        else:
            stored = still.family.stored(made)
            for name, parameter in still.free.items():
                parameter.copy_(stored[name])
    return frozen


# --------------------------------------------------------------------------------------------------
# Stable names of weights, the same for every grouping and layout of the parameters.
#
#     blocks.{i}.R, blocks.{i}.W, blocks.{i}.bias, blocks.{i}.pos, neck.…, head.weight, head.bias
#
# with blocks.{i}.mix1.NAME, blocks.{i}.mix2.NAME in place of R and W where a family has parameters.
# Exports and checkpoints use only these, so they fit every grouping, layout and world size.


@dataclass(frozen=True)
class NamedPart:
    """A tensor of the network: a whole parameter, or what is at `index` in its first dimensions."""

    name: str
    parameter: nn.Parameter
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape[len(self.index) :])

    def of(self, tensor: Tensor) -> Tensor:
        """The part's view of a tensor that is laid out as the whole parameter."""
        return tensor[self.index] if self.index else tensor


def named_parts(model: LipNeXt) -> list[NamedPart]:
    """Every number of the network in exactly one part, in the order of the blocks."""
    parts: list[NamedPart] = []
    for group in model.block_groups():
        if group.family is not None:
            for index, (name, free) in product(range(group.count), group.free.items()):
                block = f"blocks.{group.first + index}"
                parts += [NamedPart(f"{block}.mix{w + 1}.{name}", free, (index, w)) for w in (0, 1)]
        for index in range(group.count if group.family is None else 0):
            for which, letter in enumerate("RW"):
                name = f"blocks.{group.first + index}.{letter}"
                if group.layout == "bank":
                    parts.append(NamedPart(name, group.bank, (index, which)))
                else:
                    parts.append(NamedPart(name, group.matrices[2 * index + which]))
        for index in range(group.count):
            block = f"blocks.{group.first + index}"
            parts.append(NamedPart(f"{block}.bias", group.bias, (index,)))
            if group.pos is not None:
                parts.append(NamedPart(f"{block}.pos", group.pos, (index,)))
    if model.neck is not None:
        parts += [NamedPart(f"neck.{name}", p) for name, p in model.neck.named_parameters()]
    parts.append(NamedPart("head.weight", model.head.weight))
    parts.append(NamedPart("head.bias", model.head.bias))
    return parts
