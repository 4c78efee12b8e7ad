"""The model that ships with the package is the one that its card describes."""

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lipnext_scale.certification import Certifier, load_model
from lipnext_scale.certification.certificate import weights_digest
from lipnext_scale.checkpoint.exports import ZOO
from lipnext_scale.data import read_samples
from lipnext_scale.utils.errors import UserError

NAMES = [path.stem for path in sorted(ZOO.glob("*.safetensors"))]
SHARDS = Path(__file__).parents[2] / "data" / "cifar10" / "test-*.tar"


def images(count: int) -> torch.Tensor:
    """Clouds of all sizes, from numpy's generator, whose streams do not change."""
    rng, found = np.random.Generator(np.random.Philox(0)), np.zeros((count, 3, 32, 32))
    for side in (2, 4, 8, 16, 32):
        noise = rng.standard_normal((count, 3, side, side))
        found += noise.repeat(32 // side, axis=2).repeat(32 // side, axis=3) / side**0.5
    return torch.from_numpy((128 + 48 * found).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_the_zoo_is_certified_again(name: str) -> None:
    """500 images whose labels and radii are stored beside it; to rounding, on every CPU."""
    weights = ZOO / f"{name}.safetensors"
    card, facts = (ZOO / f"{name}.md").read_text(), json.loads((ZOO / f"{name}.json").read_text())
    assert hashlib.sha256(weights.read_bytes()).hexdigest() in card
    shares = (facts["clean_accuracy"], *facts["certified_accuracy"].values())
    assert f"| {' | '.join(f'{share:.2%}' for share in shares)} |".replace("%", " %") in card
    stored = np.loadtxt(ZOO / f"{name}.csv", delimiter=",", skiprows=1)
    certifier = Certifier.load(f"zoo:{name}")
    assert weights_digest(load_model(f"zoo:{name}")) == facts["model"]["weights"]
    assert certifier.lipschitz_bound == pytest.approx(facts["lipschitz_bound"], abs=1e-9)
    labels, radii = certifier(images(len(stored)))
    assert len(stored) == 500 and len({*labels.tolist()}) > 4
    clear = stored[:, 1] > 1e-6
    assert (labels.numpy() == stored[:, 0])[clear].all()
    np.testing.assert_allclose(radii.numpy(), stored[:, 1], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(not list(SHARDS.parent.glob(SHARDS.name)), reason="data/cifar10 is not there")
def test_its_certificate_is_that_of_the_test_set() -> None:
    """Where `make cifar` has put the test images: the same shares, but for an image whose radius is
    within rounding of ε."""
    facts = json.loads((ZOO / "cifar10-small.json").read_text())
    samples = read_samples(str(SHARDS), "data.test")
    labels, radii = Certifier.load("zoo:cifar10-small")(samples.images)
    right = labels == samples.labels
    assert right.double().mean().item() == pytest.approx(facts["clean_accuracy"], abs=1.5e-4)
    for epsilon, share in facts["certified_accuracy"].items():
        found = (right & (radii >= float(epsilon))).double().mean().item()
        assert found == pytest.approx(share, abs=1.5e-4)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"zoo:cifar: is not in the zoo, which has cifar10-small"):
        Certifier.load("zoo:cifar")


def write(name: str) -> None:
    """The 500 labels and radii: python tests/certification/test_certification_zoo.py NAME"""
    labels, radii = Certifier.load(f"zoo:{name}")(images(500))
    with (ZOO / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["label", "radius"])
        writer.writerows(zip(labels.tolist(), radii.tolist(), strict=True))


if __name__ == "__main__":
    import sys

    write(sys.argv[1])
