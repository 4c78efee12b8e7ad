"""Certify a run's model on its test set.

    python -m lipnext_scale.certify --run runs/digits [--json F] [--radii 36/255 0.5]

Writes certificate.json, cra.png and examples.png into the run directory and prints a table.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lipnext_scale.certify.certificate import DEFAULT_RADII, certify
from lipnext_scale.certify.loading import load_model
from lipnext_scale.certify.pictures import draw_curve, draw_examples
from lipnext_scale.config import as_float
from lipnext_scale.cpu import keep_freed_memory
from lipnext_scale.data import read_test_samples
from lipnext_scale.errors import ArgumentParser, UserError, command
from lipnext_scale.run_directory import RunDirectory


def _radius(text: str) -> float:
    radius = as_float(text)
    if radius is None or radius < 0:
        raise UserError(f"--radii {text}: must be a number of at least 0, such as 36/255")
    return radius


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.certify", description=__doc__.split("\n")[0])
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--json", type=Path, help="also write the certificate to this file")
    parser.add_argument(
        "--radii", nargs="+", help="radii to report, default 36/255 72/255 108/255 0.5"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float64"),
        default="float64",
        help="arithmetic of the forward pass (default float64)",
    )
    arguments = parser.parse_args(argv)
    epsilons = tuple(_radius(text) for text in arguments.radii or []) or DEFAULT_RADII
    keep_freed_memory()
    directory = RunDirectory(arguments.run)
    data = directory.recipe().data
    model = load_model(arguments.run).to(getattr(torch, arguments.dtype))
    takes = model.config
    samples = read_test_samples(data, takes.image_size, takes.in_channels, takes.num_classes)
    result = certify(model, samples, epsilons)
    outputs: dict[Path, Callable[[Path], None]] = {
        directory.curve_picture: partial(draw_curve, result, samples),
        directory.examples_picture: partial(draw_examples, result, samples),
        directory.certificate: result.certificate.write,
    }
    if arguments.json is not None:
        if not arguments.json.name or arguments.json.is_dir():
            raise UserError(f"--json {arguments.json}: must name a file")
        outputs[arguments.json] = result.certificate.write
    for path, write in outputs.items():
        try:
            write(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"certificate of {directory.path} on {data.test}")
    print(result.certificate.table())
    print("written: " + ", ".join(str(path) for path in outputs))


if __name__ == "__main__":
    main()
