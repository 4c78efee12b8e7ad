"""The orthogonal group O(d), its Lie algebra of skew matrices, and how far a matrix is from it."""

import torch
from torch import Tensor

from lipnext_scale.manifold.exponential import Workspace


def skew(matrix: Tensor) -> Tensor:
    """skew(A) = (A - Aᵀ)/2, exactly skew in floating point because a-b = -(b-a)."""
    return torch.sub(matrix, matrix.mT).mul_(0.5)


def lie_gradient_reference(point: Tensor, gradient: Tensor) -> Tensor:
    """Xᵀ·grad f(X), grad f(X) = G - X·sym(XᵀG) the Riemannian gradient as the paper prints it."""
    product = point.mT @ gradient
    riemannian = gradient - point @ ((product + product.mT) / 2)
    return point.mT @ riemannian


def lie_gradient(
    point: Tensor, gradient: Tensor, workspace: Workspace | None = None, scale: float = 1.0
) -> Tensor:
    """`scale` times the same in one product instead of three: for XᵀX = I it is skew(XᵀG).

    With a workspace the result lives in it, until the workspace is next used.
    """
    if workspace is None:
        return skew(point.mT @ gradient).mul_(scale)
    product = workspace.like("product", point, row_padding=16)
    torch.baddbmm(product, point.mT, gradient, beta=0, alpha=scale / 2, out=product)
    return torch.sub(product, product.mT, out=workspace.like("change", point))


def identity_deviation(matrix: Tensor) -> Tensor:
    """XᵀX - I."""
    gram = matrix.mT @ matrix
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram


def orthogonality_error(matrix: Tensor) -> Tensor:
    """‖XᵀX - I‖_F / √d of each matrix: the root mean square column of XᵀX - I, comparable in d."""
    return torch.linalg.matrix_norm(identity_deviation(matrix)) / matrix.shape[-1] ** 0.5


def random_orthogonal(
    dimension: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A matrix uniform on O(d): QR of a Gaussian, with signs that make QR unique (Haar measure).

    The Gaussian is drawn on the CPU for every device, so that a seed means the same everywhere.
    """
    gaussian = torch.randn(dimension, dimension, generator=generator, dtype=dtype, device="cpu")
    q, r = torch.linalg.qr(gaussian.to(device))
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return q * signs


# --------------------------------------------------------------------------------------------------
# Polar retraction: the orthogonal matrix nearest to X in Frobenius norm (Algorithm 2, line 21).

# Newton-Schulz converges from every singular value in (0, √3). A deviation ‖XᵀX-I‖_F below this
# keeps all of them in (0.7, 1.23), where each iteration at least squares the error: e → (3e²+e³)/4.
NEWTON_SCHULZ_LIMIT = 0.5
MAX_ITERATIONS = 12


def polar_reference(matrix: Tensor) -> Tensor:
    """U·Vᵀ of the singular value decomposition X = U·Σ·Vᵀ, as the paper does it."""
    u, _, vh = torch.linalg.svd(matrix)
    return u @ vh


def polar_retract(matrix: Tensor) -> Tensor:
    """The polar factor of each matrix [..., d, d], by Newton-Schulz; by SVD where that may fail.

    X ← X(3I - XᵀX)/2 = X - X·(XᵀX - I)/2. Two products an iteration; two iterations bring a
    deviation of 1e-3 to float32 round-off.
    """
    if matrix.numel() == 0:  # a rank may own none of a bank's matrices
        return matrix.clone()
    retracted = matrix.reshape(-1, *matrix.shape[-2:]).clone()
    round_off = 4 * torch.finfo(matrix.dtype).eps * matrix.shape[-1] ** 0.5
    previous = float("inf")
    for _ in range(MAX_ITERATIONS):
        deviation = identity_deviation(retracted)
        errors = torch.linalg.matrix_norm(deviation)
        far = ~(errors < NEWTON_SCHULZ_LIMIT)
        worst = errors.max().item()
        if bool(far.any()):
            assert bool(retracted[far].isfinite().all()), (
                "polar_retract was given non-finite matrices"
            )
            retracted[far] = polar_reference(retracted[far])
            continue
        # One more step from an error e leaves about e², so below √round-off this step is the last;
        # an error that no longer falls is round-off itself.
        if worst <= round_off or worst >= previous:
            break
        previous = worst
        retracted = torch.baddbmm(retracted, retracted, deviation, alpha=-0.5)
        if worst * worst < round_off * 0.1:
            break
    return retracted.reshape(matrix.shape)
