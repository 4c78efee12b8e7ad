"""Certified radii (docs/certificate.md): how far a prediction provably holds, in l2."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lipnext_scale.certify.layers import BlockFacts, network_bound
from lipnext_scale.certify.lipschitz import gamma
from lipnext_scale.certify.rounding import Affine, feature_rounding
from lipnext_scale.losses import class_distances
from lipnext_scale.models import LipNeXt

# The largest radius that is given. No two images are as far apart, and rounding grows with it.
FURTHEST = 1e4


@dataclass(frozen=True)
class Guarantee:
    """What all images of a model have in common: K, the rounding of features, ‖w_i - w_j‖."""

    lipschitz: float
    rounding: Affine
    distances: Tensor


def guarantee(
    model: LipNeXt, blocks: dict[int, BlockFacts], lipschitz: float | None = None
) -> Guarantee:
    """lipschitz: taken for K instead of the bound; what follows is then no certificate."""
    in_order = [blocks[number] for number in range(model.config.depth)]
    bound = network_bound(in_order)
    rounding = feature_rounding(in_order, model.config, model.head.weight.dtype)
    if lipschitz is not None:
        bound = lipschitz
    return Guarantee(bound, rounding, head_distances(model))


@torch.no_grad()
def head_distances(model: LipNeXt) -> Tensor:
    """Upper bounds of ‖w_i - w_j‖ of the normalised head rows, in float64; 0 for equal rows."""
    weight = model.head.normalized_weight().double()
    distances = torch.stack([(weight - row).norm(dim=-1) for row in weight])
    return distances * (1 + gamma(weight.shape[1] + 8))


@torch.no_grad()
def certified_margins(model: LipNeXt, images: Tensor, known: Guarantee) -> tuple[Tensor, Tensor]:
    """(predicted labels, radii) of NCHW images in [0, 1].

    With m_j the computed margin over class j, d_j = ‖w_top - w_j‖, E the rounding of features and
    h that of the head, an exact margin is at least m_j - d_j·E - h. At a distance r it is lower by
    at most K·d_j·r, and is computed with errors E' and h' there. So the prediction holds, exactly
    and as computed, as far as

        r = min_{j≠top} (m_j - h - h')/(K·d_j) - (E + E')/K,

    and all errors are taken where they are largest, at the end of that distance without them.
    """
    with torch.autocast(images.device.type, enabled=False):
        features = model.features(images).double()
    weight, bias = model.head.normalized_weight().double(), model.head.bias.double()
    logits = F.linear(features, weight, bias)
    top = logits.argmax(1, keepdim=True)
    margins, distances = logits.gather(1, top) - logits, known.lipschitz * known.distances

    without = _smallest_ratio(margins, distances, top).clamp(max=FURTHEST)
    norms = (images.double() - 0.5).flatten(1).norm(dim=1) * (1 + 1e-9) + without
    rounding = known.rounding.at(norms)
    sizes = features.norm(dim=1) + known.lipschitz * without + 2 * rounding
    # |fl(w·f + b) - (w·f + b)| ≤ γ_{C+1}·(‖w‖‖f‖ + |b|) for each of two logits, and rows that are
    # normalised to γ_{C+4}: 8·γ is more than both, and there are two places.
    head = 16 * gamma(features.shape[1] + 8) * (sizes + bias.abs().max())
    radii = _smallest_ratio(margins - head[:, None], distances, top)
    radii = (radii - 2 * rounding / known.lipschitz).clamp(min=0, max=FURTHEST)
    # The last few operations round too.
    return top.squeeze(1), radii * (1 - 1e-14)


def _smallest_ratio(margins: Tensor, distances: Tensor, top: Tensor) -> Tensor:
    """min_{j≠top} margin_j / distance_top,j, at least 0.

    A class with the same row keeps its margin for ever: x/0 = ±inf. The top class is left out.
    """
    ratios = (margins / distances[top.squeeze(1)]).scatter(1, top, float("inf"))
    return ratios.min(1).values.nan_to_num(nan=0.0, posinf=float("inf")).clamp_min(0)


@torch.no_grad()
def nominal_radii(logits: Tensor, normalized_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(predicted labels, radii) as if K were 1 and the logits exact: a quick look, no certificate.

    For training runs, in whatever precision they compute.
    """
    top = logits.argmax(1, keepdim=True)
    margins = logits.gather(1, top) - logits
    return top.squeeze(1), _smallest_ratio(margins, class_distances(normalized_weight), top)
