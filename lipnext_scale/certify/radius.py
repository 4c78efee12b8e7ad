"""Certified radii (docs/certificate.md): how far a prediction provably holds, in l2."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lipnext_scale.certify.lipschitz import lipschitz_bound
from lipnext_scale.losses import class_distances
from lipnext_scale.models import LipNeXt
from lipnext_scale.progress import Progress


@torch.no_grad()
def certified_radii(
    model: LipNeXt, images: Tensor, lipschitz: float | None = None
) -> tuple[Tensor, Tensor]:
    """(predicted labels, radii) of NCHW images in [0, 1]: min_{j≠top} margin_j / (K·‖w_top - w_j‖).

    lipschitz: K, computed from the weights if not given. The radii are float64.
    """
    images = _as_the_model_takes_them(images, model.head.weight.dtype)
    bound = lipschitz_bound(model) if lipschitz is None else lipschitz
    return _radii(model, images, bound, head_distances(model))


def _as_the_model_takes_them(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Mistakes that would give a radius of something else than was meant are refused."""
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images are {kind}: must be a floating point tensor in [0, 1]")
    if torch.promote_types(images.dtype, dtype) != dtype:
        raise ValueError(f"images are {images.dtype}, the weights {dtype}: use model.double()")
    # Points somewhat outside [0, 1] are legitimate (attacks); pixels up to 255 are not.
    if images.numel() and not bool(images.abs().max() < 16):
        raise ValueError(f"images go up to {images.abs().max():g}: this model takes [0, 1]")
    return images.to(dtype)


def require_certifiable(model: LipNeXt) -> None:
    """A bfloat16 forward pass is another function than the one that K speaks of."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(f"a certificate needs float32 or float64 weights, not {dtypes}")
    if model.head.weight.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        raise ValueError("a certificate needs full float32 products: TF32 is switched on")


@torch.no_grad()
def head_distances(model: LipNeXt) -> Tensor:
    """‖w_i - w_j‖ of the normalised head rows as the forward pass has them, in float64."""
    weight = model.head.normalized_weight().double()
    return torch.stack([(weight - row).norm(dim=-1) for row in weight])


def _radii(
    model: LipNeXt, images: Tensor, bound: float, distances: Tensor
) -> tuple[Tensor, Tensor]:
    """The head is applied in float64, and the rounding of its sums is taken off every margin.

    So two classes with the same row, whose exact logits tie, cannot be told apart by rounding.
    """
    require_certifiable(model)
    with torch.autocast(images.device.type, enabled=False):
        features = model.features(images).double()
    weight, bias = model.head.normalized_weight().double(), model.head.bias.double()
    logits = F.linear(features, weight, bias)
    top = logits.argmax(1, keepdim=True)
    # |fl(w·f + b) - (w·f + b)| ≤ γ·(‖w‖‖f‖ + |b|) with γ ≈ (C+2)·2⁻⁵³ and ‖w‖ ≈ 1: twice that each.
    unit = 2 * (features.shape[1] + 2) * 2.0**-53
    rounding = 2 * unit * (features.norm(dim=1, keepdim=True) + bias.abs().max())
    margins = logits.gather(1, top) - logits - rounding
    return top.squeeze(1), _smallest_ratio(margins, bound * distances, top)


def _smallest_ratio(margins: Tensor, distances: Tensor, top: Tensor) -> Tensor:
    """min_{j≠top} margin_j / distance_top,j, at least 0.

    A class with the same row keeps its margin for ever: x/0 = ±inf. The top class is left out.
    """
    ratios = (margins / distances[top.squeeze(1)]).scatter(1, top, float("inf"))
    return ratios.min(1).values.clamp_min(0)


@torch.no_grad()
def nominal_radii(logits: Tensor, normalized_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(predicted labels, radii) as if K were 1 and the logits exact: a quick look, no certificate.

    For training runs, in whatever precision they compute.
    """
    top = logits.argmax(1, keepdim=True)
    margins = logits.gather(1, top) - logits
    return top.squeeze(1), _smallest_ratio(margins, class_distances(normalized_weight), top)


@torch.no_grad()
def evaluate_radii(
    model: LipNeXt,
    images: Tensor,
    lipschitz: float | None = None,
    batch_size: int = 512,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """`certified_radii` of a whole set of uint8 images, batch by batch, on the CPU afterwards."""
    weight = model.head.weight
    bound = lipschitz_bound(model) if lipschitz is None else lipschitz
    distances = head_distances(model)
    labels, radii = [], []
    for part in images.split(batch_size):
        label, radius = _radii(model, part.to(weight.device, weight.dtype) / 255, bound, distances)
        labels.append(label.cpu())
        radii.append(radius.cpu())
        if progress is not None:
            progress.advance(len(part))
    return torch.cat(labels), torch.cat(radii)
