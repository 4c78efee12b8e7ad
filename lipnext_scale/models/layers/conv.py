"""3×3 convolutions of the token grid in place of shift and product (`model.kernel_size: 3`).

(A·x)[p] = Σ_s A_s·x[p - s], circular, with a C×C matrix A_s for each offset s. In the Fourier
domain it is one product for each frequency f, with Â(f) = Σ_s A_s·exp(-2πi·f·s/n), and Aᵀ is Â(f)ᴴ:
families that are made of a matrix are made of each Â(f) (Trockman & Kolter, ICLR 2021).
Kernels are [..., C, C, k, k] with the offset 0 at k//2, spectra [..., n, n//2 + 1, C, C]: the other
frequencies are conjugates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lipnext_scale.models.layers import lip_reg
from lipnext_scale.models.layers.aol import AOL, row_sums
from lipnext_scale.models.layers.base import Family, Parameters, Shapes, gram_norm, largest_entry
from lipnext_scale.models.layers.bro import BRO
from lipnext_scale.models.layers.cayley import CAYLEY
from lipnext_scale.models.layers.cpl import CPL
from lipnext_scale.models.layers.exp import EXP
from lipnext_scale.models.layers.lip_reg import LIP_REG
from lipnext_scale.models.layers.lot import LOT
from lipnext_scale.models.layers.sll import LARGEST, SLL

SIZE = 3
# A stored kernel that reaches every token has T·C² numbers, and T²·C² products an image.
LARGEST_GRID = 16


@dataclass(frozen=True, kw_only=True)
class Convolution(Family):
    """Of a grid of side × side tokens; `made` has a kernel, a spectrum, or Q and c (see `Gated`).

    dense: the family of 1×1 that it generalises. size: of the stored kernel.
    """

    dense: Family
    side: int
    size: int = SIZE

    def made_shapes(self, width: int) -> Shapes:
        kernel = (width, width, self.size, self.size)
        gated = "c" in self.dense.made_shapes(width)
        return {"Q": kernel, "c": (width,)} if gated else {"kernel": kernel}

    def stored(self, made: Parameters) -> Parameters:
        if "spectrum" not in made:
            return made
        kernel = torch.fft.irfft2(made["spectrum"], (self.side, self.side), dim=(-4, -3))
        return {"kernel": torch.fft.fftshift(kernel, dim=(-4, -3)).movedim((-4, -3), (-2, -1))}

    def mix(self, made: Parameters, x: Tensor) -> Tensor:
        """Of x [N, n, n, C], with the made tensors of one mixer."""
        if "spectrum" in made:
            return convolve_spectrum(x, made["spectrum"])
        if "kernel" in made:
            return convolve(x, made["kernel"])
        inside = F.relu(convolve(x, made["Q"]) + made["c"])
        return torch.add(x, convolve(inside, transposed(made["Q"])), alpha=-2)


# --------------------------------------------------------------------------------------------------


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """[N, n, n, C] → [N, n, n, C], by products: a certificate needs sums of products, not the
    Winograd or Fourier algorithms that libraries have for convolutions."""
    middle = kernel.shape[-1] // 2
    columns = torch.cat([x.roll(j - middle, 2) for j in range(kernel.shape[-1])], dim=-1)
    rows = kernel.permute(2, 0, 3, 1).flatten(2)  # [k, C, k·C]
    result = F.linear(columns, rows[0]).roll(-middle, 1)
    for i in range(1, len(rows)):
        result = result + F.linear(columns, rows[i]).roll(i - middle, 1)
    return result


def convolve_spectrum(x: Tensor, spectrum: Tensor) -> Tensor:
    """The same in the Fourier domain, for training: n²·C² products in place of n⁴·C²."""
    transformed = torch.fft.rfft2(x.to(spectrum.real.dtype), dim=(1, 2))
    mixed = torch.einsum("hwoi,nhwi->nhwo", spectrum, transformed)
    return torch.fft.irfft2(mixed, x.shape[1:3], dim=(1, 2)).to(x.dtype)


def transposed(kernel: Tensor) -> Tensor:
    """Of the convolution as a matrix, for an odd k."""
    return kernel.transpose(-4, -3).flip(-2, -1)


def phases(size: int, side: int, device: torch.device) -> Tensor:
    """exp(-2πi·f·s/n) in complex128 for each frequency and offset, [n, n//2 + 1, size, size]."""
    turns = torch.arange(side, device=device)
    angles = turns.double() * (2 * math.pi / side)
    # Roots of unity in conjugate pairs: -1 has no imaginary part.
    cosine, sine = angles.cos(), angles.sin()
    roots = torch.complex(cosine + cosine[-turns], sine[-turns] - sine) / 2
    at = torch.outer(turns, torch.arange(size, device=device) - size // 2)
    return roots[(at[:, None, :, None] + at[: side // 2 + 1, None, :]) % side]


def spectrum(kernel: Tensor, side: int) -> Tensor:
    """Â(f), [..., n, n//2 + 1, C, C]."""
    factors = phases(kernel.shape[-1], side, kernel.device)
    parts = [
        torch.einsum("...oiab,hwab->...hwoi", kernel, part.to(kernel.dtype))
        for part in (factors.real, factors.imag)
    ]
    return torch.complex(*parts)


def gram_row_sums(kernel: Tensor, ratios: Tensor | float = 1.0) -> Tensor:
    """Σ_{j,s} |(AᵀA)_s|_ij·ratios_ij, [..., C]; on a grid that wraps round it is no less."""
    found, size = [], kernel.shape[-1]
    for down, right in product(range(1 - size, size), repeat=2):
        one = kernel[..., max(down, 0) : size + down, max(right, 0) : size + right]
        two = kernel[..., max(-down, 0) : size - down, max(-right, 0) : size - right]
        gram = torch.einsum("...oiab,...ojab->...ij", one, two)
        found.append((gram * ratios).abs().sum(-1))
    return row_sums(torch.stack(found, dim=-1))


# --------------------------------------------------------------------------------------------------
# The families. What is not an orthogonal matrix of each Â(f) keeps a 3×3 kernel.


def of_dense(
    dense: Family,
    side: int,
    made: Callable[[Parameters], dict[str, Tensor]],
    norm: Callable[[Parameters], Tensor] | None = None,
    size: int = SIZE,
) -> Convolution:
    """With kernels for its matrices. They start as these at the offset 0, and 0 around them."""

    def shapes(width: int) -> Shapes:
        return {
            name: (*shape, SIZE, SIZE) if len(shape) > 1 else shape
            for name, shape in dense.shapes(width).items()
        }

    def initial(width: int, generator: torch.Generator) -> dict[str, Tensor]:
        around = (SIZE // 2,) * 4
        return {
            name: F.pad(value[..., None, None], around) if value.dim() > 2 else value
            for name, value in dense.initial(width, generator).items()
        }

    return Convolution(shapes, initial, made, norm, dense=dense, side=side, size=size)


def orthogonal(dense: Family, side: int) -> Convolution:
    """The dense family's matrix of every Â(f)."""

    def made(free: Parameters) -> dict[str, Tensor]:
        return {"spectrum": dense.made({n: spectrum(t, side) for n, t in free.items()})["matrix"]}

    return of_dense(dense, side, made, size=side)


def largest(kernel: Tensor) -> Tensor:
    """[..., 1]."""
    return largest_entry(kernel.flatten(-4, -2)).squeeze(-1)


def aol(side: int) -> Convolution:
    def made(free: Parameters) -> dict[str, Tensor]:
        a = free["A"] / largest(free["A"])[..., None, None, None]
        return {"kernel": a / gram_row_sums(a).sqrt()[..., None, :, None, None]}

    return of_dense(AOL, side, made)


def cpl(side: int) -> Convolution:
    """‖A‖ is the largest of ‖Â(f)‖, each bounded from above."""

    def made(free: Parameters) -> dict[str, Tensor]:
        scale = largest(free["A"])
        a = free["A"] / scale[..., None, None, None]
        norm = gram_norm(spectrum(a, side)).amax((-4, -3)).squeeze(-1).clamp_min(1)
        return {"Q": a / norm[..., None, None, None], "c": free["b"] / (scale * norm)}

    return of_dense(CPL, side, made)


def sll(side: int) -> Convolution:
    def made(free: Parameters) -> dict[str, Tensor]:
        scale, q = largest(free["A"]), free["log_q"].clamp(-LARGEST, LARGEST)
        a = free["A"] / scale[..., None, None, None]
        root = gram_row_sums(a, (q[..., None, :] - q[..., :, None]).exp()).sqrt()
        return {"Q": transposed(a) / root[..., None, None, None], "c": free["b"] / (scale * root)}

    return of_dense(SLL, side, made)


def regularised(side: int) -> Convolution:
    """lip_reg."""

    def made(free: Parameters) -> dict[str, Tensor]:
        kernel = free["A"].clone()
        kernel[..., SIZE // 2, SIZE // 2].diagonal(dim1=-2, dim2=-1).add_(1)
        return {"kernel": kernel}

    def norm(made: Parameters) -> Tensor:
        return lip_reg.norm(spectrum(made["kernel"], side)).amax((-4, -3))

    return of_dense(LIP_REG, side, made, norm)


ORTHOGONAL: dict[str, Family] = {"cayley": CAYLEY, "exp": EXP, "lot": LOT, "bro": BRO}
OTHERS = {"aol": aol, "cpl": cpl, "sll": sll, "lip_reg": regularised}
CONVOLUTIONS = (*ORTHOGONAL, *OTHERS)


def convolution(layer: str, side: int) -> Convolution:
    """The family `layer` as a 3×3 convolution of side × side tokens."""
    return orthogonal(ORTHOGONAL[layer], side) if layer in ORTHOGONAL else OTHERS[layer](side)
