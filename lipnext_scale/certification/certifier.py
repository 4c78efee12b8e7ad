"""`Certifier`: a model that gives each prediction with its proven radius (docs/certificate.md).

    certifier = Certifier.load("digits.safetensors")
    labels, radii = certifier(images)

From bottom to top: norms bounded from above, and K; the rounding of features; radii; refusals.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from lipnext_scale.checkpoint import SUMS
from lipnext_scale.checkpoint.exports import is_export, load_export
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import to_unit_range
from lipnext_scale.losses import class_distances
from lipnext_scale.models import BlockGroup, LipNeXt, LipNeXtConfig, is_frozen
from lipnext_scale.models.blocks import matrix_list
from lipnext_scale.models.layers.conv import spectrum
from lipnext_scale.utils.errors import UserError

# Raise it with every change of what a radius is: chunks of an older proof are then not reused.
PROOF = "2"

# --------------------------------------------------------------------------------------------------
# Guaranteed upper bounds of norms, tight for matrices near O(d). They are computed in float64, with
# the rounding of the computation itself added: bounds, not estimates.

UNIT_ROUNDOFF = 2.0**-53
MAX_ITERATIONS = 7
ANY_ITERATIONS = 24  # for a whole norm, not a deviation
# Tightening a factor of K by half of this would not show in a radius.
GOOD_ENOUGH = 1e-6
SMALLEST = 1e-300  # K of zeros: radii have it as a divisor


@torch.no_grad()
def spectral_norm_bound(matrix: Tensor) -> float:
    """An upper bound of ‖X‖₂ for one matrix near O(d): √(1 + ‖XᵀX - I‖₂), bounded from above."""
    x = matrix.detach().double()
    deviation = x.mT @ x
    deviation.diagonal().sub_(1)
    # |fl(XᵀX) - XᵀX| ≤ γ·|X|ᵀ|X| entry by entry, whose Frobenius norm is at most γ·‖X‖_F²; taking
    # 1 off the diagonal rounds each of its entries once more.
    frobenius = frobenius_above(x)
    slack = gamma(x.shape[-2]) * frobenius * frobenius
    slack += 2 * UNIT_ROUNDOFF * deviation.diagonal().abs().max().item()
    return above(math.sqrt(above(1 + gram_bound(deviation) + slack)))


def norm_bound(matrix: Tensor) -> float:
    """The same for any matrix [m, n] with m ≤ n, such as a contraction's."""
    bound = spectral_norm_bound(matrix.mT)
    if bound > 1 + GOOD_ENOUGH:
        bound = min(bound, gram_bound(matrix.detach().double(), ANY_ITERATIONS))
    return bound


def gram_bound(matrix: Tensor, iterations: int = MAX_ITERATIONS) -> float:
    """An upper bound of ‖E‖₂ by Gram iteration: ‖E‖₂² = ‖EᵀE‖₂, repeated, ending in ‖·‖₂ ≤ ‖·‖_F.

    Each iteration halves the logarithm of what the Frobenius norm overestimates. With M_{t+1} the
    computed Gram matrix of M_t/c_t and c_t = ‖M_t‖_F, rounding enters as
    ‖M_t‖₂² ≤ c_t²·(‖M_{t+1}‖₂ + γ).
    """
    current = matrix
    scales: list[float] = []
    for iteration in range(iterations):
        norm = torch.linalg.matrix_norm(current).item()
        # ‖·‖_F ≤ √d·‖·‖₂, and each iteration has taken a root of that factor.
        least = matrix.shape[-1] ** (-(0.5 ** (iteration + 1)))
        if norm == 0 or not math.isfinite(norm):
            break
        if _unwind(current, scales) * (1 - least) < GOOD_ENOUGH:
            break
        scales.append(norm)
        scaled = current / norm
        current = scaled.mT @ scaled
    return _unwind(current, scales)


def _unwind(last: Tensor, scales: list[float]) -> float:
    """From the last iterate's Frobenius norm back to a bound of ‖M_0‖₂."""
    bound = frobenius_above(last)
    # γ for the product, and two roundings of each entry by the division; 1 % more than ‖M/c‖_F² = 1
    # needs covers the rounding of the norm c itself.
    rounding = 1.01 * gamma(last.shape[-1] + 4)
    for scale in reversed(scales):
        bound = above(scale * math.sqrt(above(bound + rounding)))
    return bound


TWIDDLE = 64 * UNIT_ROUNDOFF  # of exp(-2πi·f·s/n): cos and sin to a few ulp, of angles up to 2π


@torch.no_grad()
def convolution_bound(kernel: Tensor, side: int) -> float:
    """The same for a circular convolution, [C, C, k, k], of side × side tokens.

    It is the largest ‖Â(f)‖₂; a complex X + iY has the norm of [[X, -Y], [Y, X]]. Of k² products
    with rounded factors, both parts of each entry of Â(f) lose at most (γ + TWIDDLE)·Σ_s|A_s|.
    """
    norms = []
    for matrix in spectrum(kernel.detach().double(), side).flatten(0, 1):
        upper = torch.cat([matrix.real, -matrix.imag], dim=1)
        lower = torch.cat([matrix.imag, matrix.real], dim=1)
        norms.append(norm_bound(torch.cat([upper, lower])))
    largest = torch.tensor(norms, dtype=torch.float64).max().item()  # NaN where one is
    return above(largest + 2 * (gamma(kernel[0, 0].numel()) + TWIDDLE) * absolute_norm(kernel))


def mixer_bound(weight: Tensor, side: int) -> float:
    """Of a matrix or of a kernel. A machine that flushes subnormal numbers sees 0 for some."""
    bound = norm_bound(weight) if weight.dim() == 2 else convolution_bound(weight, side)
    return bound + weight.numel() * torch.finfo(weight.dtype).smallest_normal


def absolute_norm(weight: Tensor) -> float:
    """Of a kernel Σ_s ‖A_s‖_F, a bound of the norm of Σ_s |A_s|·|x[p - s]|; of a matrix ‖A‖_F."""
    if weight.dim() == 2:
        return frobenius_above(weight)
    taps = weight.flatten(2).unbind(-1)
    return above(sum(map(frobenius_above, taps)) * (1 + gamma(len(taps))))


def gamma(terms: int, unit: float = UNIT_ROUNDOFF) -> float:
    """γ_n = n·u/(1 - n·u): the relative error of a sum of n products, added in any order."""
    return terms * unit / (1 - terms * unit) if terms * unit < 1 else math.inf


def frobenius_above(numbers: Tensor) -> float:
    """The root of the sum of squares, raised by what that sum, in any order, can have lost."""
    numbers = numbers.double()
    if not numbers.any():
        return 0.0
    norm = torch.linalg.vector_norm(numbers).item() * (1 + gamma(numbers.numel() + 8))
    return norm + math.sqrt(2 * numbers.numel() * torch.finfo(numbers.dtype).smallest_normal)


def above(value: float) -> float:
    """Raise a computed scalar by eight units in the last place: more than its operations lost."""
    return value * (1 + 16 * UNIT_ROUNDOFF)


# --------------------------------------------------------------------------------------------------
# The facts of the weights that a certificate needs, block by block, and K, which follows from them.
#
# features = pool ∘ block_L ∘ … ∘ block_1 ∘ stem. The stem, the shift, the activation and the
# pooling are 1-Lipschitz for all weights, so K = Π ‖R_i‖₂·‖W_i‖₂, or of gated mixers the product of
# their own constants. A dense neck in place of the pooling has the norms of its matrices.


@dataclass(frozen=True)
class GateFacts:
    """Upper bounds of the norms of x - 2·Qᵀσ(Q·x + c) (residual) or of 2·Aᵀσ(B·x + c)."""

    inner: float  # ‖Q‖₂ or ‖B‖₂
    outer: float  # ‖Q‖₂ or ‖A‖₂
    inner_frobenius: float  # of a kernel `absolute_norm`
    outer_frobenius: float
    bias: float
    residual: bool


@dataclass(frozen=True)
class BlockFacts:
    """Upper bounds of a block's norms; those of the bias and of pos are l2 norms."""

    rotation: float  # ‖R‖₂, or the constant of the first mixer
    weight: float  # ‖W‖₂, or that of the second
    rotation_frobenius: float  # of a kernel `absolute_norm`
    weight_frobenius: float
    bias: float
    pos: float
    taps: int = 1  # k² of a kernel: so many times C are the terms of a sum
    gates: tuple[GateFacts, ...] = ()  # of gated mixers, in place of the two Frobenius norms

    @property
    def norms(self) -> tuple[float, ...]:
        return self.rotation, self.weight


@dataclass(frozen=True)
class DenseFacts:
    """Upper bounds of the norms of x ↦ act(A·x + b), A [m, n] with m ≤ n, at so many places."""

    norm: float
    frobenius: float
    bias: float
    terms: int  # n
    places: int

    @property
    def norms(self) -> tuple[float, ...]:
        return (self.norm,)


Facts = BlockFacts | DenseFacts


def gate_bound(made: Mapping[str, Tensor], side: int = 1) -> float:
    """An upper bound of a gated mixer's Lipschitz constant, of its stored tensors.

    σ's slopes between two points are a diagonal D, 0 ≤ D ≤ 1. I - 2QᵀDQ is symmetric, and
    0 ≤ QᵀDQ ≤ ‖Q‖²: its norm is at most max(1, 2‖Q‖² - 1). With p = A·u and q = B·v for unit u, v,
    2pᵀDq ≤ (p + q)ᵀD(p + q)/2 ≤ ‖[A B]‖²·(‖u‖² + ‖v‖²)/2: the norm of 2AᵀDB is at most ‖[A B]‖².
    """
    if "Q" in made:
        bound = above(2 * above(mixer_bound(made["Q"], side) ** 2) - 1)
        return 1.0 if bound <= 1 else bound  # NaN stays
    return above(norm_bound(torch.cat([made["A"], made["B"]], dim=-1)) ** 2)


def gate_facts(made: Mapping[str, Tensor], side: int = 1) -> GateFacts:
    inner, outer = (made["Q"], made["Q"]) if "Q" in made else (made["B"], made["A"])
    norm = mixer_bound(inner, side)
    return GateFacts(
        inner=norm,
        outer=norm if outer is inner else mixer_bound(outer, side),
        inner_frobenius=absolute_norm(inner),
        outer_frobenius=absolute_norm(outer),
        bias=frobenius_above(made["c"]),
        residual="Q" in made,
    )


def layer_count(config: LipNeXtConfig) -> int:
    """Of which there are facts: the blocks, then the matrices of a dense neck."""
    return config.depth + (2 + config.neck_depth if config.neck == "dense" else 0)


@torch.no_grad()
def measure_layers(model: LipNeXt, part: int = 0, parts: int = 1) -> list[Facts]:
    """The facts of every `parts`-th layer from `part` on: several processes share the work."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"{name}: holds values that are not finite; nothing can be certified")
    found: list[Facts] = []
    for group in model.block_groups():
        for index in range(group.count):
            if (group.first + index) % parts == part:
                found.append(_block_facts(group, index, model.config))
    for index in range(model.config.depth, layer_count(model.config)):
        if index % parts == part:
            found.append(_dense_facts(model, index - model.config.depth))
    return found


def _dense_facts(model: LipNeXt, index: int) -> DenseFacts:
    neck = model.neck
    assert neck is not None and neck.frozen
    matrix = neck.matrices(neck.bias.dtype)[index]
    places = neck.joint // len(neck.squares) if index == 0 else 1
    bias = frobenius_above(neck.bias[index - 1]) if index else 0.0
    return DenseFacts(
        mixer_bound(matrix, 1), frobenius_above(matrix), bias, matrix.shape[1], places
    )


def _block_facts(group: BlockGroup, index: int, config: LipNeXtConfig) -> BlockFacts:
    bias = frobenius_above(group.bias[index])
    pos = 0.0 if group.pos is None else frobenius_above(group.pos[index])
    side = config.side
    if group.family is None:
        rotation, weight = matrix_list(group.orthogonal_weights())[2 * index : 2 * index + 2]
    else:
        mixers = [{name: t[index, which] for name, t in group.free.items()} for which in (0, 1)]
        if "kernel" not in mixers[0]:
            taps = next(iter(mixers[0].values()))[0, 0].numel()
            first, second = (gate_bound(made, side) for made in mixers)
            gates = tuple(gate_facts(made, side) for made in mixers)
            return BlockFacts(first, second, 0.0, 0.0, bias, pos, taps, gates)
        rotation, weight = (made["kernel"] for made in mixers)
    bound = spectral_norm_bound if config.layer == "manifold" else partial(mixer_bound, side=side)
    norms = bound(rotation), bound(weight), absolute_norm(rotation), absolute_norm(weight)
    return BlockFacts(*norms, bias, pos, rotation[0, 0].numel())


def product_loss(
    terms: int, numbers: int, frobenius: float, dtype: torch.dtype
) -> tuple[float, float]:
    """‖fl(A·X) - A·X‖_F ≤ share·‖X‖_F + beside, for A [n, n] of this norm and X of so many numbers.

    |fl(A·X) - A·X| ≤ γ_n·|A||X| entry by entry, whatever the order of the sums. Beside it, what
    lies below the smallest normal number may be lost: of products and sums (4n of them, which
    leaves room for γ), of the entries of A, of those of X.

    A convolution is one with A [C, n], n = k²·C, and copies of X; `absolute_norm` is its norm here.
    """
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    share = gamma(terms, info.eps / 2) * frobenius + terms * tiny
    return share, (4 * terms + frobenius) * math.sqrt(numbers) * tiny


def network_bound(layers: Iterable[Facts]) -> float:
    """K = Π ‖R_i‖₂·‖W_i‖₂, times the norms of a dense neck."""
    bound = 1.0
    for layer in layers:
        for norm in layer.norms:
            bound = above(bound * norm)
    if not math.isfinite(bound):
        raise UserError(
            "the weights are so large that their norm overflows; nothing can be certified"
        )
    return max(bound, SMALLEST)


def lipschitz_bound(model: LipNeXt) -> float:
    """K of `model.features`: 1 + a little after training. Weights must be finite."""
    return network_bound(measure_layers(model))


# --------------------------------------------------------------------------------------------------
# How far computed features can be from the exact ones: a bound carried along the layers.
#
# Everything that the forward pass does is a sum of products in some order, an addition, or exact
# (shift, |·|, MinMax): the standard bounds |fl(A·x) - A·x| ≤ γ_n·|A||x| and |fl(a + b) - (a + b)| ≤
# u·|a + b| hold for every order of summation, with and without fused multiply-adds. Norms and
# errors are affine functions of n = ‖x - ½‖, so the bound is computed once for a model and costs
# nothing per image. Nothing here assumes that the weights are orthogonal.

# A thousandth more covers the rounding of computing the bound itself.
OWN_ROUNDING = 1.001


@dataclass(frozen=True)
class Affine:
    """offset + slope·n, both at least 0."""

    offset: float
    slope: float

    def __add__(self, other: "Affine | float") -> "Affine":
        if isinstance(other, Affine):
            return Affine(self.offset + other.offset, self.slope + other.slope)
        return Affine(self.offset + other, self.slope)

    def __mul__(self, factor: float) -> "Affine":
        return Affine(self.offset * factor, self.slope * factor)

    def at(self, n: Tensor) -> Tensor:
        return self.offset + self.slope * n

    def or_larger(self, other: "Affine") -> "Affine":
        """At least both, for every n ≥ 0."""
        return Affine(max(self.offset, other.offset), max(self.slope, other.slope))


@dataclass(frozen=True)
class FeatureRounding:
    """Of images with ‖x - ½‖ = n, in one arithmetic.

    error: bounds ‖features as computed - exact features‖. largest: bounds every number on the way,
    partial sums included. size: bounds the norm of what the pooling squares.
    """

    error: Affine
    largest: Affine
    size: Affine
    dtype: torch.dtype

    def overflows(self, n: Tensor) -> Tensor:
        """Where some number on the way might not be finite, so that `error` says nothing."""
        limit = torch.finfo(self.dtype).max / 4
        return ~((self.largest.at(n) <= limit) & (self.size.at(n) <= math.sqrt(limit)))


def feature_rounding(
    layers: Sequence[Facts], config: LipNeXtConfig, dtype: torch.dtype
) -> FeatureRounding:
    """The exact network begins at pixels p/255 and has weights in dtype."""
    info = torch.finfo(dtype)
    unit, tiny = info.eps / 2, info.smallest_normal
    width, tokens = config.width, (config.image_size // config.patch_size) ** 2
    numbers, pixels = width * tokens, config.in_channels * config.image_size**2

    flushed = 2 * math.sqrt(numbers) * tiny  # by one addition to every number
    norm = Affine(0.0, 1.0)  # of the exact values; ‖x‖ ≤ ‖x - ½‖ + ½·√pixels
    # p/255 may round twice, for CUDA multiplies by a rounded 1/255; then - ½.
    error = Affine(unit * math.sqrt(pixels) + flushed, 3 * unit)
    largest = norm + error
    for block in layers[: config.depth]:
        assert isinstance(block, BlockFacts)
        if block.pos:
            # pos is one number for all C channels of a token.
            norm = norm + math.sqrt(width) * block.pos
            error = error + (norm + error) * unit + flushed

        terms = width * block.taps
        if block.gates:
            for gate, bound in zip(block.gates, (block.rotation, block.weight), strict=True):
                norm, error, most = through_gate(
                    gate, bound, norm, error, terms, (width, tokens), dtype
                )
                largest = largest.or_larger(most)
            norm = norm + math.sqrt(tokens) * block.bias
            error = error + (norm + error) * unit + flushed
            largest = largest.or_larger(norm + error)
            continue

        computed = norm + error
        largest = largest.or_larger(computed * (2 * block.rotation_frobenius + 2))
        share, beside = product_loss(terms, numbers, block.rotation_frobenius, dtype)
        error = error * block.rotation + computed * share + beside
        norm = norm * block.rotation

        # The bias is one more term in each sum.
        computed, bias = norm + error, math.sqrt(tokens) * block.bias
        largest = largest.or_larger((computed * block.weight_frobenius + bias) * 2)
        share, beside = product_loss(terms + 1, numbers, block.weight_frobenius, dtype)
        error = error * block.weight + computed * share + beside + gamma(terms + 1, unit) * bias
        norm = norm * block.weight + bias
    for dense in layers[config.depth :]:
        assert isinstance(dense, DenseFacts)
        computed, terms = norm + error, dense.terms + 1
        largest = largest.or_larger((computed * dense.frobenius + dense.bias) * 2)
        share, beside = product_loss(terms, dense.places * terms, dense.frobenius, dtype)
        beside += gamma(terms, unit) * dense.bias
        error = error * dense.norm + computed * share + beside
        norm = norm * dense.norm + dense.bias
    size = norm + error
    if config.neck == "l2_pool":
        # A sum of T squares and a root. Squares that underflow leave at most √(2·T·tiny).
        error = error + size * gamma(tokens + 4, unit) + math.sqrt(2 * numbers * tiny)
    return FeatureRounding(error * OWN_ROUNDING, largest, size, dtype)


def through_gate(
    gate: GateFacts,
    bound: float,
    norm: Affine,
    error: Affine,
    terms: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[Affine, Affine, Affine]:
    """(norm, error, largest number on the way) behind a mixer whose Lipschitz bound is given."""
    (width, tokens), info = shape, torch.finfo(dtype)
    numbers, bias = width * tokens, math.sqrt(tokens) * gate.bias
    unit, computed = info.eps / 2, norm + error
    # σ(Q·x + c): the bias is one more term in each sum, and σ is exact.
    share, beside = product_loss(terms + 1, numbers, gate.inner_frobenius, dtype)
    lost = computed * share + (beside + gamma(terms + 1, unit) * bias)
    inside = computed * gate.inner + bias + lost
    largest = (computed * gate.inner_frobenius + bias) * 2
    # Twice its product with Qᵀ, and at 0 that is at most 2·‖Q‖·‖c‖.
    share, beside = product_loss(terms, numbers, gate.outer_frobenius, dtype)
    lost = lost * gate.outer + inside * share + beside
    largest = largest.or_larger(computed + inside * (4 * gate.outer_frobenius + 4))
    norm = norm * bound + 2 * gate.outer * bias
    error = error * bound + lost * 2
    if gate.residual:  # x - …
        error = error + (norm + error) * unit + 2 * math.sqrt(numbers) * info.smallest_normal
    return norm, error, largest


# --------------------------------------------------------------------------------------------------
# Radii: how far a prediction provably holds, in l2.

# The largest radius. No two images are as far apart, and rounding grows with it.
FURTHEST = 1e4
# Norms of head rows that normalise without overflow, underflow or F.normalize's smallest divisor.
ROW_NORMS = (1e-9, 1e18)


@torch.no_grad()
def head_distances(model: LipNeXt) -> Tensor:
    """Upper bounds of ‖w_i - w_j‖ of the head's exact rows, in float64."""
    weight = model.head.weight.double()
    slack = gamma(weight.shape[1] + 8)
    if not model.head.unit:
        distances = torch.stack([(weight - row).norm(dim=-1) for row in weight])
        smallest = torch.finfo(weight.dtype).smallest_normal  # squares may underflow
        return distances * (1 + slack) + 2 * math.sqrt(weight.shape[1] * smallest)
    norms = weight.norm(dim=1, keepdim=True)
    # By its bits: a row whose squares underflow has a norm of 0 and is no zero row.
    bits = torch.int64 if model.head.weight.dtype == torch.float64 else torch.int32
    nonzero = (model.head.weight.view(bits) * 2 != 0).any(1)
    for row, norm in enumerate(norms.flatten().tolist()):
        if nonzero[row] and not ROW_NORMS[0] <= norm <= ROW_NORMS[1]:
            raise UserError(
                f"head.weight: row {row} has norm {norm:g}: must be 0 or "
                f"{ROW_NORMS[0]:g} to {ROW_NORMS[1]:g}, or normalising it loses digits"
            )
    unit_rows = weight / norms.clamp_min(ROW_NORMS[0])
    distances = torch.stack([(unit_rows - row).norm(dim=-1) for row in unit_rows])
    return distances * (1 + slack) + 4 * slack


@torch.no_grad()
def row_length(model: LipNeXt) -> float:
    """An upper bound of the length of the head's rows."""
    if model.head.unit:
        return 1.0
    longest = max(frobenius_above(row) for row in model.head.weight)
    if not ROW_NORMS[0] <= longest <= ROW_NORMS[1]:
        right = f"must be {ROW_NORMS[0]:g} to {ROW_NORMS[1]:g}, or its products lose digits"
        raise UserError(f"head.weight: its longest row has norm {longest:g}: {right}")
    return longest


def _smallest_ratio(margins: Tensor, distances: Tensor, top: Tensor) -> Tensor:
    """min_{j≠top} margin_j / distance_top,j, at least 0.

    A class with the same row always keeps its margin: x/0 = ±inf.
    """
    ratios = (margins / distances[top.squeeze(1)]).scatter(1, top, float("inf"))
    return ratios.min(1).values.nan_to_num(nan=0.0, posinf=float("inf")).clamp_min(0)


@torch.no_grad()
def nominal_radii(logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(predicted labels, radii) as if K were 1 and the logits exact: a quick look, no certificate.

    For training runs, in their own precision.
    """
    top = logits.argmax(1, keepdim=True)
    margins = logits.gather(1, top) - logits
    return top.squeeze(1), _smallest_ratio(margins, class_distances(rows), top)


# --------------------------------------------------------------------------------------------------
# A model from a run directory, one of its checkpoints, or an export.


def load_model(path: str | Path) -> LipNeXt:
    """The slow weights of a run's newest checkpoint or of a given one, or an export."""
    path = Path(path)
    run = run_of(path)
    if run is None:
        return load_export(path).eval()
    return run.load_model(path if run.path != path else None).eval()


def run_of(path: Path) -> RunDirectory | None:
    """The run that a run directory or a checkpoint belongs to; None for an export."""
    if is_export(path):
        return None
    if not path.is_dir():
        raise UserError(f"{path}: no such run directory, checkpoint or export")
    is_checkpoint = (path / SUMS).is_file()
    return RunDirectory(path.absolute().parent.parent if is_checkpoint else path)


# --------------------------------------------------------------------------------------------------
# The certifier, and what it refuses.


class Certifier:
    """model: in float32 or float64, the arithmetic that is certified.

    layers: the facts of its layers, if known; they are trusted. lipschitz: replaces the proven
    bound K, for experiments: the radii are then no certificate.
    """

    def __init__(
        self,
        model: LipNeXt,
        layers: list[Facts] | None = None,
        lipschitz: float | None = None,
    ) -> None:
        require_certifiable(model)
        self.model, self.dtype = model.eval(), model.head.weight.dtype
        layers = layers or measure_layers(model)
        if len(layers) != (count := layer_count(model.config)):
            raise ValueError(f"facts of {len(layers)} layers: the model has {count}")
        proven = network_bound(layers)
        self.assumed = lipschitz is not None
        self.lipschitz_bound = proven if lipschitz is None else lipschitz
        self.rounding = feature_rounding(layers, model.config, self.dtype)
        self._distances, self._row_length = head_distances(model), row_length(model)
        self._seen = fingerprint(model)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "Certifier":
        """Of a run directory, a checkpoint or an export, in float64."""
        return cls(load_model(path).to(device, torch.float64))

    def feature_rounding(self) -> float:
        """The largest distance of computed features from exact ones, over all images in [0, 1]."""
        config = self.model.config
        corner = torch.tensor(config.in_channels * config.image_size**2 / 4.0).sqrt()
        return self.rounding.error.at(corner.double()).item()

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(labels, radii) of NCHW images, floating point in [0, 1] or uint8; radii are float64.

        No image within a label's radius, in the l2 norm of pixels in [0, 1], has another label.
        """
        require_certifiable(self.model)
        if fingerprint(self.model) != self._seen:
            raise ValueError("the weights have changed since K was computed: make a new Certifier")
        device = self.model.head.weight.device
        if images.dtype == torch.uint8:
            images = to_unit_range(images, device, self.dtype)
        # Refused: images for which a radius would mean something else.
        if not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}: must be uint8 or float in [0, 1]")
        if torch.promote_types(images.dtype, self.dtype) != self.dtype:
            kinds = f"images are {images.dtype}, the weights {self.dtype}"
            raise ValueError(f"{kinds}: use model.double()")
        # Attacks may leave [0, 1] by a little; pixels up to 255 are a mistake.
        if images.numel() and not bool(images.abs().max() < 16):
            raise ValueError(f"images go up to {images.abs().max():g}: this model takes [0, 1]")
        return self._certify(images.to(device, self.dtype))

    @torch.no_grad()
    def _certify(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(labels, radii) as `model(images)` computes them.

        With m_j the computed margin over class j, d_j = ‖w_top - w_j‖, E the rounding of features
        and h that of the head, an exact margin is at least m_j - d_j·E - h. At a distance r it is
        lower by at most K·d_j·r, and is computed with errors E' and h' there. So the prediction
        holds, exactly and as computed, as far as

            r = min_{j≠top} (m_j - h - h')/(K·d_j) - (E + E')/K,

        and all errors are taken where they are largest, at the end of that distance without them.
        Where a number might overflow there, nothing is certified.
        """
        model, lipschitz = self.model, self.lipschitz_bound
        with torch.autocast(images.device.type, enabled=False):
            features = model.features(images)
            logits = model.head(features)[0].double()
        top = logits.argmax(1, keepdim=True)
        margins, distances = logits.gather(1, top) - logits, lipschitz * self._distances

        info, bias = torch.finfo(features.dtype), model.head.bias.double().abs().max()
        unit, width = info.eps / 2, features.shape[1]
        without = _smallest_ratio(margins, distances, top).clamp(max=FURTHEST)
        # A pixel p/255 has been rounded already.
        given = images.double().flatten(1)
        norms = (given - 0.5).norm(dim=1) + 2 * unit * given.norm(dim=1)
        norms = norms * (1 + 1e-9) + without
        rounding = self.rounding.error.at(norms)
        sizes = features.double().norm(dim=1) + lipschitz * without + 2 * rounding
        sizes = self._row_length * sizes + bias
        # |fl(w·f + b) - (w·f + b)| ≤ γ_{C+1}·(‖w‖‖f‖ + |b|) for each of two logits, and rows that
        # are normalised to γ_{C+4}: 8·γ is more than both, and there are two places.
        flushed = width * info.smallest_normal * max(1.0, self._row_length)
        head = 16 * (gamma(width + 8, unit) * sizes + flushed)
        radii = _smallest_ratio(margins - head[:, None], distances, top)
        radii = (radii - 2 * rounding / lipschitz).clamp(min=0, max=FURTHEST)
        unbounded = self.rounding.overflows(norms) | ~(sizes <= info.max / 4)
        # The last few operations round too.
        return top.squeeze(1), torch.where(unbounded, 0.0, radii * (1 - 1e-14))


def certified_radii(
    model: LipNeXt, images: Tensor, lipschitz: float | None = None
) -> tuple[Tensor, Tensor]:
    """(labels, radii) of images; a `Certifier` saves measuring the weights each time."""
    return Certifier(model, lipschitz=lipschitz)(images)


PROVEN = {"beta_abs", "minmax"}  # activations that are 1-Lipschitz, and exact when computed


def require_certifiable(model: LipNeXt) -> None:
    """A forward pass in bfloat16 or TF32 is another function than the one that K bounds."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtypes |= {group.compute_dtype for group in model.block_groups() if group.compute_dtype}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(
            f"a certificate needs weights and a forward pass in float32 or in float64, not {names}"
        )
    if not is_frozen(model):
        kind = f"layer {model.config.layer!r}, neck {model.config.neck!r}"
        raise ValueError(f"{kind}: a certificate needs stored matrices: freeze(model)")
    for activation in {group.spec.activation for group in model.block_groups()} - PROVEN:
        raise ValueError(f"activation {activation!r} has no proven Lipschitz bound")
    hooks = [*_global_forward_hooks, *_global_forward_pre_hooks]
    for module in model.modules():
        hooks += [*module._forward_hooks, *module._forward_pre_hooks]
    if hooks:
        raise ValueError("a certificate needs a model without forward hooks: they may change it")
    if dtypes == {torch.float32}:
        precision = product_precision(model.head.weight.device.type)
        if precision not in ("ieee", "none", "highest"):
            raise ValueError(
                f"a certificate needs full float32 products, and torch is set to {precision}: "
                'torch.set_float32_matmul_precision("highest"), or model.double()'
            )


def product_precision(device_type: str) -> str:
    """The precision of float32 products, by torch's new interface or, before 2.9, the old one.

    The new one sees what was set by the old one; the old one raises after the new was used.
    """
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        if os.environ.get(name, "STRICT").upper() != "STRICT":
            return f"{name}={os.environ[name]}"
    if device_type == "cuda" and os.environ.get("NVIDIA_TF32_OVERRIDE", "0") != "0":
        return "NVIDIA_TF32_OVERRIDE"
    backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    new = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    return new if new is not None else torch.get_float32_matmul_precision()


@torch.no_grad()
def fingerprint(model: LipNeXt) -> list[object]:
    """Changes when the function does: the architecture, and a hash of all bits and their places.

    A hash, because torch's own count of writes misses those to `.data`.
    """
    found: list[object] = [model.config, *(group.spec for group in model.block_groups())]
    for parameter in model.parameters():
        words = parameter.detach().reshape(-1).view(torch.int32)
        for start in range(0, len(words), 1 << 24):  # in parts, to spare memory
            part = words[start : start + (1 << 24)]
            factors = torch.arange(start + 1, start + 1 + len(part), device=part.device)
            factors = factors * 0x1E3779B97F4A7C15  # and what overflows is dropped
            factors = (factors ^ (factors >> 29)) | 1
            found.append(int((part * factors).sum()))
    return found
