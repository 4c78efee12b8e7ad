"""The orthogonal group O(d), its Lie algebra of skew matrices, and how far a matrix is from it."""

import torch
from torch import Tensor

from lipnext_scale.manifold.workspace import Workspace


def skew(matrix: Tensor) -> Tensor:
    """skew(A) = (A - Aᵀ)/2, exactly skew in floating point because a-b = -(b-a)."""
    return torch.sub(matrix, matrix.mT).mul_(0.5)


def lie_gradient_reference(point: Tensor, gradient: Tensor) -> Tensor:
    """Xᵀ·grad f(X), grad f(X) = G - X·sym(XᵀG) the Riemannian gradient as the paper prints it."""
    product = point.mT @ gradient
    riemannian = gradient - point @ ((product + product.mT) / 2)
    return point.mT @ riemannian


def lie_gradient(point: Tensor, gradient: Tensor, workspace: Workspace | None = None) -> Tensor:
    """The same in one product instead of three: for XᵀX = I it is skew(XᵀG).

    With a workspace the result lives in it, until the workspace is next used.
    """
    if workspace is None:
        return skew(point.mT @ gradient)
    product = workspace.like("product", point, row_padding=16)
    torch.baddbmm(product, point.mT, gradient, beta=0, alpha=0.5, out=product)  # XᵀG/2
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

    The Gaussian is drawn on the CPU whatever the device, so that a seed means the same everywhere.
    """
    gaussian = torch.randn(dimension, dimension, generator=generator, dtype=dtype, device="cpu")
    q, r = torch.linalg.qr(gaussian.to(device))
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
    return q * signs
