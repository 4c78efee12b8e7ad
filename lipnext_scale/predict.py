"""Label image files, each with its certified radius; they need no labels and no shards.

    python -m lipnext_scale.predict --model digits.safetensors photo.png folder
    python -m lipnext_scale.predict --model runs/digits folder --csv found.csv --sheet sheet.png

Images are made as those of the test set: resized, their centre cut out. The radius is about that,
the network's input.
"""

import lipnext_scale.utils.passive  # noqa: F401

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lipnext_scale.certification import Certifier
from lipnext_scale.certification.certificate import CHUNK, class_name, write_csv, writing
from lipnext_scale.certification.certifier import run_of
from lipnext_scale.certification.report import squeezed
from lipnext_scale.checkpoint.exports import export_data
from lipnext_scale.data.decode import BadSample, image_header
from lipnext_scale.data.evaluation import network_input
from lipnext_scale.distributed.processes import choose_device
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.utils.errors import ArgumentParser, UserError, command
from lipnext_scale.utils.files import atomic_file
from lipnext_scale.utils.progress import Progress

SUFFIXES = (".png", ".jpg", ".jpeg")
COLUMNS, SHOWN = 4, 100  # of a sheet; more images would make it too long to look at
LONGEST = 18  # characters of a class name that fit above an image


class Prediction(NamedTuple):
    file: str
    label: int
    name: str
    radius: float

    @property
    def shown_radius(self) -> str:
        """Rounded down: a radius that is shown is certified."""
        return f"{math.floor(self.radius * 1e4) / 1e4:.4f}"


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    for option, path in (("--csv", arguments.csv), ("--sheet", arguments.sheet)):
        if path is not None and (not path.name or path.is_dir() or not path.parent.is_dir()):
            raise UserError(f"{option} {path}: must name a file in a directory that exists")
    if arguments.sheet is not None and arguments.sheet.suffix != ".png":
        raise UserError(f"--sheet {arguments.sheet}: must end in .png")
    files = [file for path in arguments.images for file in image_files(path)]
    run = run_of(arguments.model)
    data = export_data(arguments.model) if run is None else run.data_facts()
    certifier = Certifier.load(arguments.model, choose_device(arguments.device))
    size, channels = certifier.model.config.image_size, certifier.model.config.in_channels
    resize = data.test_resize if arguments.resize is None else arguments.resize
    if resize and resize < size:
        raise UserError(f"--resize {resize}: must be 0 or at least {size}")
    found, images = predict(certifier, files, resize, data.classes)
    made = f" (short side {resize}, centre cut out)" if resize else ""
    about = f"l2 radii of its input, {channels}×{size}×{size} pixels in [0, 1]{made}"
    print(f"{arguments.model}: {about}; K = {certifier.lipschitz_bound:.9f}")
    print(table(found))
    if arguments.csv is not None:
        with writing(arguments.csv):
            write_csv(arguments.csv, [Prediction._fields, *found])
    if arguments.sheet is not None:
        with writing(arguments.sheet), atomic_file(arguments.sheet) as file:
            contact_sheet(found, images).savefig(file, format="png")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lipnext_scale.predict", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", required=True, type=Path, help="a run, a checkpoint, an export, zoo:NAME"
    )
    parser.add_argument("images", nargs="+", type=Path, help="JPEG and PNG files, folders of them")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table, with all digits")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help=f"draw the first {SHOWN} images")
    parser.add_argument(
        "--resize", type=int, help="short side before the centre is cut out (default: the model's)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    return parser


def image_files(path: Path) -> list[Path]:
    """A file as it is; of a folder the images in it and below, by name."""
    if not path.is_dir():
        return [path]
    inside = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    found = sorted(file for file in inside if file.is_file())
    if not found:
        raise UserError(f"{path}: has no image ({', '.join(SUFFIXES)}) in it")
    return found


def predict(
    certifier: Certifier, files: list[Path], resize: int, classes: tuple[str, ...]
) -> tuple[list[Prediction], list[np.ndarray]]:
    """And the first SHOWN inputs [H, W, C]. A file that cannot be used ends it."""
    takes, progress = certifier.model.config, Progress(len(files), 0, "image", "predict", 10)
    found: list[Prediction] = []
    images: list[np.ndarray] = []
    for start in range(0, len(files), CHUNK):  # as in certification
        part = files[start : start + CHUNK]
        made = [read_image(file, takes, resize) for file in part]
        images += made[: SHOWN - len(images)]
        labels, radii = certifier(torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2))
        for file, label, radius in zip(part, labels.tolist(), radii.tolist(), strict=True):
            shown = str(file).encode(errors="backslashreplace").decode()  # it may be no Unicode
            found.append(Prediction(shown, label, class_name(classes, label), radius))
        progress.advance(len(part))
    progress.close()
    return found, images


def read_image(path: Path, takes: LipNeXtConfig, resize: int) -> np.ndarray:
    size = takes.image_size
    try:
        encoded = path.read_bytes()
        _, height, width, _ = image_header(encoded)
        if not resize and (height, width) != (size, size):
            right = f"the model takes {size}×{size}; --resize {size} makes it fit"
            raise BadSample(f"is {height}×{width}, and {right}")
        return network_input(encoded, None, size, takes.in_channels, resize)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except BadSample as reason:
        raise UserError(f"{path} {reason}") from None


def table(found: list[Prediction]) -> str:
    rows = [("file", "label", "certified radius")]
    rows += [(one.file, one.name, one.shown_radius) for one in found]
    file, label = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {row[0]:<{file}}  {row[1]:<{label}}  {row[2]:>16}" for row in rows)


def contact_sheet(found: list[Prediction], images: list[np.ndarray]) -> Figure:
    """Inputs under label and radius, legible in the 400 pixels of a phone."""
    columns = min(COLUMNS, len(images))
    rows = -(-len(images) // columns)
    width, height = 1.4 * columns, 1.75 * rows
    figure = Figure(figsize=(width, height), dpi=214)
    edges = (0.08 / width, 0.06 / height, 1 - 0.08 / width, 1 - 0.38 / height)
    figure.subplots_adjust(*edges, 0.08, 0.34)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    axes: Axes
    for axes in grid:
        axes.axis("off")
    for axes, one, image in zip(grid, found, images, strict=False):
        axes.imshow(squeezed(image), "gray", vmin=0, vmax=255)
        name = one.name if len(one.name) <= LONGEST else one.name[: LONGEST - 1] + "…"
        axes.set_title(f"{name}\nr = {one.shown_radius}", fontsize=9, parse_math=False)
    return figure


if __name__ == "__main__":
    main()
