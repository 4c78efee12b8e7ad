"""Certified radii (docs/certificate.md): how far a prediction provably holds, in l2."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lipnext_scale.certification.bounds import BlockFacts, gamma, network_bound
from lipnext_scale.certification.rounding import FeatureRounding, feature_rounding
from lipnext_scale.losses import class_distances
from lipnext_scale.models import LipNeXt
from lipnext_scale.utils.errors import UserError

# Raise it with every change of what a radius is: chunks of an older proof are then not reused.
PROOF = "2"
# The largest radius. No two images are as far apart, and rounding grows with it.
FURTHEST = 1e4
# Norms of head rows that normalise without overflow, underflow or F.normalize's smallest divisor.
ROW_NORMS = (1e-9, 1e18)


@dataclass(frozen=True)
class Guarantee:
    """What holds for all images of a model: K, the rounding of features, ‖w_i - w_j‖."""

    lipschitz: float
    rounding: FeatureRounding
    distances: Tensor


def guarantee(
    model: LipNeXt, blocks: dict[int, BlockFacts], lipschitz: float | None = None
) -> Guarantee:
    """lipschitz: replaces the bound K; the radii are then no certificate."""
    in_order = [blocks[number] for number in range(model.config.depth)]
    bound = network_bound(in_order)
    rounding = feature_rounding(in_order, model.config, model.head.weight.dtype)
    return Guarantee(bound if lipschitz is None else lipschitz, rounding, head_distances(model))


@torch.no_grad()
def head_distances(model: LipNeXt) -> Tensor:
    """Upper bounds of ‖w_i - w_j‖ of the exactly normalised head rows, in float64."""
    weight = model.head.weight.double()
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
    slack = gamma(weight.shape[1] + 8)
    return distances * (1 + slack) + 4 * slack


@torch.no_grad()
def certified_margins(model: LipNeXt, images: Tensor, known: Guarantee) -> tuple[Tensor, Tensor]:
    """(predicted labels, radii) of NCHW images in [0, 1], as `model(images)` computes them.

    With m_j the computed margin over class j, d_j = ‖w_top - w_j‖, E the rounding of features and
    h that of the head, an exact margin is at least m_j - d_j·E - h. At a distance r it is lower by
    at most K·d_j·r, and is computed with errors E' and h' there. So the prediction holds, exactly
    and as computed, as far as

        r = min_{j≠top} (m_j - h - h')/(K·d_j) - (E + E')/K,

    and all errors are taken where they are largest, at the end of that distance without them. Where
    a number might overflow there, nothing is certified.
    """
    with torch.autocast(images.device.type, enabled=False):
        features = model.features(images)
        logits = model.head(features)[0].double()
    top = logits.argmax(1, keepdim=True)
    margins, distances = logits.gather(1, top) - logits, known.lipschitz * known.distances

    info, bias = torch.finfo(features.dtype), model.head.bias.double().abs().max()
    unit, width = info.eps / 2, features.shape[1]
    without = _smallest_ratio(margins, distances, top).clamp(max=FURTHEST)
    # A pixel p/255 has been rounded already.
    given = images.double().flatten(1)
    norms = (given - 0.5).norm(dim=1) + 2 * unit * given.norm(dim=1)
    norms = norms * (1 + 1e-9) + without
    rounding = known.rounding.error.at(norms)
    sizes = features.double().norm(dim=1) + known.lipschitz * without + 2 * rounding + bias
    # |fl(w·f + b) - (w·f + b)| ≤ γ_{C+1}·(‖w‖‖f‖ + |b|) for each of two logits, and rows that are
    # normalised to γ_{C+4}: 8·γ is more than both, and there are two places.
    head = 16 * (gamma(width + 8, unit) * sizes + width * info.smallest_normal)
    radii = _smallest_ratio(margins - head[:, None], distances, top)
    radii = (radii - 2 * rounding / known.lipschitz).clamp(min=0, max=FURTHEST)
    unbounded = known.rounding.overflows(norms) | ~(sizes <= info.max / 4)
    # The last few operations round too.
    return top.squeeze(1), torch.where(unbounded, 0.0, radii * (1 - 1e-14))


def _smallest_ratio(margins: Tensor, distances: Tensor, top: Tensor) -> Tensor:
    """min_{j≠top} margin_j / distance_top,j, at least 0.

    A class with the same row always keeps its margin: x/0 = ±inf.
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
