"""Polar retraction: the orthogonal matrix nearest to X in Frobenius norm (Algorithm 2, line 21)."""

import torch
from torch import Tensor

from lipnext_scale.manifold.geometry import identity_deviation

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
