"""Certificates of random and of malicious networks, against a network written anew in 80 bits.

Every switch of the model, both types, weights far from orthogonal: features must be within the
rounding bound and K must bound their change; where a radius is given, no attack may change the
label inside it, neither the program's nor the exact one. All of it must hold for every seed.

    python tests/certification/test_certification_fuzz.py 5000   # more; prints the slack
"""

import math
import random
import sys
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from exact_network import exact_features, exact_logits, extended, needs_extended
from torch import Tensor

from lipnext_scale.attacks import pgd, random_starts
from lipnext_scale.certification import Certifier
from lipnext_scale.certification.certifier import ROW_NORMS
from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import LipNeXt, LipNeXtConfig, freeze
from lipnext_scale.utils.errors import UserError

pytestmark = needs_extended
# The reference rounds too, 2⁻¹¹ times as much as float64; the bound has a thousandth to spare.
REFERENCE = 2.0**-11


MATRICES = ["orthogonal", "rank one", "constant", "badly scaled", "gaussian", "huge", "tiny"]
MATRICES += ["null space", "steep"]
# aligned: see `align`. cancelling: W is steep, and of what a null space R makes it leaves little.
KINDS = [*MATRICES[:7], "aligned", "cancelling", "mixed"]
# Mixers with a nonlinearity, of mixed matrices.
GATED = {"residual gates": "cpl", "sandwich gates": "sandwich"}
# The same of convolutions: a stored kernel of the grid's size, one of 3×3, gates.
CONVOLUTIONS = {"full kernels": "cayley", "kernels": "lip_reg", "kernel gates": "cpl"}
STORED = GATED | CONVOLUTIONS
KINDS += STORED


def draw_matrix(kind: str, width: int, rng: random.Random, generator: torch.Generator) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    orthogonal = random_orthogonal(width, generator, torch.float64)
    match kind:
        case "rank one":
            u, v = normal(2, width)
            return torch.outer(u / u.norm(), v / v.norm()) * rng.choice([1, 3, 100])
        case "constant":
            value = rng.choice([1, 32, -5]) / width
            return torch.full((width, width), value, dtype=torch.float64)
        case "gaussian":
            return normal(width, width)
        case "badly scaled":
            return 10.0 ** torch.randint(-8, 5, (width, 1), generator=generator) * orthogonal
        case "huge":  # a few blocks of these overflow, in float32 soon
            return 10.0 ** rng.uniform(1, 12) * orthogonal
        case "tiny":  # down to numbers below the smallest normal one of float32
            return 10.0 ** -rng.uniform(1, 40) * orthogonal
        case "null space":  # 1ᵀ·R = 0 but for rounding
            ones = torch.full((width,), 1 / math.sqrt(width), dtype=torch.float64)
            return orthogonal - torch.outer(ones, ones @ orthogonal)
        case "steep":
            return orthogonal + 1e6 * normal(width, 1)
    return orthogonal


@dataclass
class Case:
    kind: str
    model: LipNeXt
    images: Tensor
    exact_images: Tensor  # the same, before any rounding
    flushes: bool  # the machine makes 0 of numbers below the smallest normal one

    def __enter__(self) -> "Case":
        torch.set_flush_denormal(self.flushes)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_flush_denormal(False)


def draw(seed: int) -> Case:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind, dtype = rng.choice(KINDS), rng.choice([torch.float32, torch.float64])
    patch, channels = rng.choice([1, 2]), rng.choice([1, 3])
    least = channels * patch**2
    widths = [least + least % 2, 12, 16, *([] if kind in CONVOLUTIONS else [64])]
    width = rng.choice([64, 128, 256] if kind == "aligned" else widths)
    config = LipNeXtConfig(
        depth=rng.randint(1, 4),
        width=width,
        image_size=patch * rng.choice([1, 3, 4]),
        patch_size=patch,
        in_channels=channels,
        num_classes=rng.randint(2, 5),
        shift_ratio=rng.choice([0, 1 / 16, 1 / 8, 1 / 4]),
        padding="circular" if kind in CONVOLUTIONS else rng.choice(["circular", "zero"]),
        positional_embedding=rng.random() < 0.7,
        activation=rng.choice(["beta_abs", "beta_abs", "minmax"]),
        beta=rng.choice([0, 0.5, 0.75, 1]),
        blocks_per_bank=rng.choice([0, 1]),
        layer=STORED.get(kind, "manifold"),
        kernel_size=3 if kind in CONVOLUTIONS else 1,
        neck=rng.choice(["l2_pool", "dense"] if width <= 16 else ["l2_pool"]),
        neck_width=rng.choice([2, width - width % 2]),
        neck_depth=rng.randint(0, 2),
        head=rng.choice(["unit", "free"]),
    )
    model = freeze(LipNeXt(config, seed).to(dtype))
    with torch.no_grad():
        for group in model.block_groups():
            for tensor in group.free.values() if kind in STORED else ():
                for made in tensor.flatten(0, 1):
                    store(made, rng, generator)
            banks = [] if kind in STORED else group.bank.flatten(0, 1)
            for index, matrix in enumerate(banks):
                cancelling = MATRICES[7 + index % 2]
                others = {"aligned": "constant", "cancelling": cancelling}
                others["mixed"] = rng.choice(MATRICES)
                made = others.get(kind, kind)
                matrix.copy_(draw_matrix(made, config.width, rng, generator))
            for vector in (group.bias, group.pos):
                if vector is not None:
                    fill(vector, rng, generator)
        if model.neck is not None:
            for matrix in model.neck.matrices(dtype):
                if rng.random() < 0.5:
                    made = draw_matrix(rng.choice(MATRICES), matrix.shape[1], rng, generator)
                    matrix.copy_(made[: len(matrix)])
            fill(model.neck.bias, rng, generator)
        fill(model.head.bias, rng, generator)
        largest = 16 if config.head == "unit" else 4
        model.head.weight *= 10.0 ** torch.randint(-8, largest, (config.num_classes, 1))
        model.head.weight[0] *= rng.random() < 0.9
        if kind == "aligned":
            align(model)
    images = draw_images(config, dtype, rng, generator)
    return Case(kind, model, *images, flushes=rng.random() < 0.3)


def store(made: Tensor, rng: random.Random, generator: torch.Generator) -> None:
    """Any matrix, kernel or bias of a mixer; half of the matrices stay as they were made."""
    if made.dim() == 1:
        fill(made, rng, generator)
    elif made.dim() == 4:
        kinds = [rng.choice(MATRICES)] if rng.random() < 0.5 else MATRICES
        for tap in made.flatten(2).unbind(-1) if rng.random() < 0.7 else ():
            tap.copy_(draw_matrix(rng.choice(kinds), len(made), rng, generator))
    elif rng.random() < 0.5:
        made.copy_(draw_matrix(rng.choice(MATRICES), len(made), rng, generator))


def align(model: LipNeXt) -> None:
    """Sums of equal terms that lose almost half a unit in the last place each time they round.

    v = 2²⁰·(1 + (C/4 - 1)·eps) C times, one after the other: while the sum is above C/2 times v a
    unit in its last place is C/2·eps, and what is lost of every further term is all but one of C/4.
    """
    width, eps = model.config.width, torch.finfo(model.head.weight.dtype).eps
    for group in model.block_groups():
        group.bias.zero_()
        if group.pos is not None:
            group.pos.fill_(2.0**20 * (1 + (width // 4 - 1) * eps))


def fill(vector: Tensor, rng: random.Random, generator: torch.Generator) -> None:
    """Numbers of all sizes; or all the same, just below a half in their last places."""
    scale = rng.choice([0.0, 1e-30, 1e-3, 0.1, 1.0, 1e4])
    if rng.random() < 0.3:
        vector.fill_(scale * (1 + rng.choice([3, 7, 15, 63]) * torch.finfo(vector.dtype).eps))
    else:
        vector.copy_(scale * torch.randn(vector.shape, generator=generator))


def draw_images(
    config: LipNeXtConfig, dtype: torch.dtype, rng: random.Random, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    shape = (3, config.in_channels, config.image_size, config.image_size)
    if rng.random() < 0.5:
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        return pixels.to(dtype) / 255, pixels
    images = torch.rand(shape, generator=generator)
    return (x := rng.choice([images, images.round(), images * 0 + 0.5]).to(dtype)), x


def exact_pixels(images: Tensor) -> np.ndarray:
    """Weights as they are, bytes as p/255."""
    values = extended(images)
    return values / np.longdouble(255) if images.dtype == torch.uint8 else values


def norm(values: np.ndarray) -> np.ndarray:
    return np.sqrt((values * values).reshape(len(values), -1).sum(axis=1))


def tightness(case: Case) -> np.ndarray:
    """Error over bound of the features, image by image; no more than 1, or the proof is wrong."""
    exact = exact_features(case.model, case.exact_images, exact_pixels)
    n = torch.from_numpy(norm(exact_pixels(case.exact_images) - 0.5).astype(np.float64))
    with case, torch.no_grad():
        rounding = Certifier(case.model).rounding
        computed = case.model.features(case.images)
    error = norm(extended(computed) - exact)
    bound = rounding.error.at(n).numpy()
    overflows = rounding.overflows(n).numpy()
    assert np.isfinite(error[~overflows]).all(), "finite by the bound, and not as computed"
    share = (error / bound).astype(np.float64)[~overflows]
    assert (share <= 1 + REFERENCE).all(), share
    return share


def attacked(case: Case) -> int:
    """Attack every image inside its radius; how many had one."""
    with case:
        certifier = Certifier(case.model)
        labels, radii = certifier(case.exact_images)
        assert torch.equal(labels, case.model(case.images).argmax(1))
    centre = exact_pixels(case.exact_images)
    reach = (radii * (1 - 1e-6)).clamp(max=8)
    for restart in range(2):
        shape, ids = tuple(case.images.shape[1:]), torch.arange(len(labels))
        starts = random_starts(shape, 0, ids, restart, stream=0).to(case.images)
        delta = pgd(case.model, case.images, labels, reach, starts, steps=8)
        moved = (case.images + delta).detach()
        inside = (norm(extended(moved) - centre) <= radii.numpy()) & (radii.numpy() > 0)
        with case, torch.no_grad():
            program = case.model(moved).argmax(1).numpy()
        exact = exact_logits(case.model, moved).argmax(axis=1)
        assert (program == labels.numpy())[inside].all(), "the program's label changes"
        assert (exact == labels.numpy())[inside].all(), "the exact label changes"
        change = norm(exact_features(case.model, moved) - exact_features(case.model, case.images))
        bound = certifier.lipschitz_bound * norm(extended(moved) - extended(case.images))
        noise = certifier.rounding.error.at(torch.tensor(1e3)).item() * REFERENCE
        assert (change <= bound + noise).all(), "K is too small"
    return int((radii > 0).sum())


def is_large(case: Case) -> bool:
    return case.model.neck is not None or case.kind in ("huge", "mixed", *STORED)


def fuzz(seeds: range) -> dict[str, dict[str, list[float]]]:
    """kind → what was seen in its networks. A failure names its seed."""
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in seeds:
        case = draw(seed)
        try:
            share, certified = tightness(case), attacked(case)
        except UserError as refused:  # K itself overflows, or a row of the head is too short
            overflows = "overflows" in str(refused) and is_large(case)
            short = (case.model.head.weight.double().norm(dim=1) < ROW_NORMS[0]).any()
            assert overflows or (short and "head.weight: row" in str(refused)), seed
            continue
        except AssertionError as failure:
            raise AssertionError(
                f"seed {seed}: {failure}; {case.kind}, {case.model.config}"
            ) from None
        kind = seen[case.kind]
        kind[str(case.images.dtype)].extend(share.tolist())
        kind["certified"].append(certified / len(case.images))
    return seen


def table(seen: dict[str, dict[str, list[float]]]) -> str:
    lines = [f"{'error / bound: median, largest':32}{'float32':>20}{'float64':>20}  with a radius"]
    for kind in KINDS:
        cells = []
        for dtype in ("torch.float32", "torch.float64"):
            shares = seen[kind][dtype] or [math.nan]
            cells.append(f"{np.median(shares):.1e}, {max(shares):.1e}")
        radii = np.mean(seen[kind]["certified"] or [0.0])
        lines.append(f"{kind:32}{cells[0]:>20}{cells[1]:>20}  {radii:.0%}")
    return "\n".join(lines)


@pytest.mark.parametrize("count", [12, pytest.param(240, marks=pytest.mark.slow)])
def test_no_network_breaks_its_certificate(count: int) -> None:
    """And many have a radius that could have been broken."""
    seen = fuzz(range(random.randrange(2**30), 2**31)[:count])
    print(table(seen))
    assert sum(map(sum, (kind["certified"] for kind in seen.values()))) > count // 12 - 1


if __name__ == "__main__":
    print(table(fuzz(range(int(sys.argv[1])))))
