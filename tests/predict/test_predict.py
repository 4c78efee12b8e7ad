"""`python -m lipnext_scale.predict`: image files get the labels and radii of certification."""

import csv
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sets_making import write_set
from shard_making import encode, noise
from training.small import small_recipe

from lipnext_scale.certify import main as certify
from lipnext_scale.export import main as export
from lipnext_scale.predict import main
from lipnext_scale.training.trainer import Trainer

NAMES = ("a cat", "a dog", "a newt")
SETTINGS = """
data.batch_size=8 data.test_resize=10 data.augment.crop_padding=0 data.augment.resize=[8,12]
model.in_channels=3 model.num_classes=3 run.max_steps=2
""".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images of 14×12 pixels with class names, its exports, and its test set as files."""
    directory = tmp_path_factory.mktemp("predict")
    shards = {
        key: write_set(directory, [count], key, (14, 12, 3), "jpg", 3, class_names=NAMES)
        for key, count in (("train", 16), ("test", 9))
    }
    sets = [f"data.{key}={pattern}" for key, pattern in shards.items()]
    Trainer(small_recipe(directory / "run", *SETTINGS, *sets)).run()
    for name in ("m.safetensors", "m"):
        export(["--run", str(directory / "run"), "--out", str(directory / name)])
    # An export as it was before exports had `data`.
    with safe_open(directory / "m.safetensors", "pt") as file:
        model = json.loads(file.metadata()["model"])
    del model["data"]
    metadata = {"model": json.dumps(model)}
    save_file(load_file(directory / "m.safetensors"), directory / "old.safetensors", metadata)
    with tarfile.open(directory / "test-000000.tar") as tar:
        inside = [member for member in tar if member.name.endswith(".jpg")]
        tar.extractall(directory / "images" / "deeper", inside, filter="data")
    (directory / "images" / "labels.txt").write_text("no image")
    return directory


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_files_are_labelled_as_certification_labels_samples(made, tmp_path, capsys):
    """By a run, an export file and an export directory, each with the run's resize and names."""
    data = ["--data", str(made / "test-*.tar"), "--out", str(tmp_path)]
    certify(["--model", str(made / "m.safetensors"), *data])
    samples = rows_of(tmp_path / "samples.csv")
    for model in ("m.safetensors", "m", "run"):
        capsys.readouterr()
        found = tmp_path / f"{model}.csv"
        main(["--model", str(made / model), str(made / "images"), "--csv", str(found)])
        rows, lines = rows_of(found), capsys.readouterr().out.splitlines()
        assert [row["label"] for row in rows] == [row["prediction"] for row in samples]
        assert [row["radius"] for row in rows] == [row["radius"] for row in samples]
        assert all(row["name"] == NAMES[int(row["label"])] for row in rows)
        assert "3×8×8 pixels in [0, 1] (short side 10, centre cut out)" in lines[0]
        for row, line in zip(rows, lines[2:], strict=True):
            assert row["file"] in line and row["name"] in line
            assert 0 <= float(row["radius"]) - float(line.split()[-1]) < 1e-4  # never rounded up
    written = json.loads((made / "m" / "config.json").read_text())
    assert written["data"] == {"test_resize": 10, "classes": list(NAMES)}


def test_an_older_export_has_numbers_for_names_and_takes_a_resize(made, tmp_path):
    files = [str(file) for file in sorted((made / "images" / "deeper").iterdir())[:5]]
    new, old = tmp_path / "new.csv", tmp_path / "old.csv"
    main(["--model", str(made / "m"), *files, "--csv", str(new)])
    sheet = ["--sheet", str(tmp_path / "sheet.png")]
    resized = ["--resize", "10", "--csv", str(old), *sheet]
    main(["--model", str(made / "old.safetensors"), *files, *resized])
    assert rows_of(old) == [{**row, "name": row["label"]} for row in rows_of(new)]
    image = Image.open(tmp_path / "sheet.png")
    assert image.width == pytest.approx(1200, abs=5)  # four columns
    assert image.height == pytest.approx(750, abs=5)  # two rows, the second with one image
    below = image.convert("L")
    quarters = [below.crop((x, 550, x + 290, 740)).getextrema()[0] for x in (0, 300, 600, 900)]
    assert quarters[0] < 200 and quarters[1:] == [255] * 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m", "{bad}/note.png"], "note.png is neither a JPEG nor a PNG"),
        (["m", "{bad}/cut.jpg"], "cut.jpg is a damaged JPEG"),
        (["m", "{bad}/empty"], "empty: has no image (.png, .jpg, .jpeg) in it"),
        (["m", "{bad}/missing.png"], "missing.png: cannot be read: No such file"),
        (["old.safetensors", "images"], "is 14×12, and the model takes 8×8; --resize 8 makes it"),
        (["images", "images"], "images: is not a run directory (it has no config.yaml)"),
        (["images/labels.txt", "images"], "labels.txt: is not a readable export"),
        (["nothing", "images"], "nothing: no such run directory, checkpoint or export"),
        (["m", "images", "--resize", "7"], "--resize 7: must be 0 or at least 8"),
        (["m", "images", "--csv", "{bad}/no/x.csv"], "x.csv: must name a file in a directory that"),
    ],
)
def test_a_mistake_is_one_line(made, tmp_path, monkeypatch, capsys, arguments, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.png").write_text("no picture")
    (tmp_path / "cut.jpg").write_bytes(encode(noise(40, 40, 3), "jpg")[:-300])
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(made)
    options = [text.format(bad=tmp_path) for text in arguments]
    with pytest.raises(SystemExit) as stopped:
        main(["--sheet", str(tmp_path / "sheet.png"), "--model", *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert sorted(tmp_path.rglob("*")) == before
