"""What certifying costs: K in units of matrix products, and images/s beside the bare forward pass.

    python -m benchmarks.certify [--width 1024] [--rounds 5]

All figures are medians of ratios within a round.
"""

import argparse
import time
from statistics import median

import torch

from benchmarks.timing import interleaved, machine, ratio
from lipnext_scale.certification import Certifier, lipschitz_bound
from lipnext_scale.certification.certifier import spectral_norm_bound
from lipnext_scale.manifold import random_orthogonal
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.utils.cpu import keep_freed_memory

LARGEST, BLOCKS = 5792, 32  # the paper's 2B model


def bound_of_a_matrix(width: int, rounds: int) -> None:
    """A float32 matrix as training leaves it, and one with a large singular value hidden in it."""
    trained = random_orthogonal(width, torch.Generator().manual_seed(0))
    double = trained.double()
    hidden = double.clone()
    hidden[:, 0] *= 1.05
    for name, x in (("as trained", trained), ("1.05 hidden", hidden)):
        runs = {
            "product": lambda: double @ double,
            "bound": lambda x=x: spectral_norm_bound(x),
        }
        times = interleaved(runs, rounds)
        products = ratio(times, "bound", "product")
        true = torch.linalg.matrix_norm(x.double(), ord=2).item()
        over = spectral_norm_bound(x) / true - 1
        work = products * 2 * LARGEST**3 * 2 * BLOCKS / 1e12
        print(f"  ‖X‖₂ of width {width}, {name}: {median(times['bound']):.2f} s, {products:.1f}")
        print(f"    products in float64, above the true norm by {over:.1e}; all of {BLOCKS} blocks")
        print(f"    of width {LARGEST} would be {work:.0f} TFLOP")


def bound_of_a_network(width: int) -> None:
    model = LipNeXt(LipNeXtConfig(4, width, 32, 4), seed=0).double()
    began = time.perf_counter()
    bound = lipschitz_bound(model)
    spent = time.perf_counter() - began
    true = 1.0
    for group in model.block_groups():
        for layer in group.layers():
            for matrix in layer:
                true *= torch.linalg.matrix_norm(matrix.detach(), ord=2).item()
    over = bound / true - 1
    print(f"  K of 4 blocks of width {width}: {spent:.1f} s, above the product by {over:.1e}")


@torch.no_grad()
def images_per_second(rounds: int) -> None:
    model = LipNeXt(LipNeXtConfig(8, 256, 32, 8), seed=0).double()
    certifier, images = Certifier(model), torch.rand(256, 3, 32, 32, dtype=torch.float64)
    runs = {"forward": lambda: model(images), "certify": lambda: certifier(images)}
    share = ratio(interleaved(runs, rounds), "forward", "certify")
    print(f"  radii of 256 images, 8 blocks of width 256: {share:.2f} of the bare forward pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    keep_freed_memory()
    print(machine())
    bound_of_a_matrix(arguments.width, arguments.rounds)
    bound_of_a_network(arguments.width)
    images_per_second(arguments.rounds)


if __name__ == "__main__":
    main()
