"""`python -m lipnext_scale.attack`: what it writes, finds and refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gloo import run_processes
from sets_making import write_set
from shard_making import noise
from tight_models import broken_model

from lipnext_scale.attack import main
from lipnext_scale.certification import load_model
from lipnext_scale.certify import main as certify
from lipnext_scale.checkpoint.exports import save_export

# The sample that the broken model was made for.
WEAK = 3
QUICK = ["--steps", "8", "--restarts", "1"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments that name a broken model and a set of 9 images in two shards."""
    directory = tmp_path_factory.mktemp("attack")
    shards = write_set(directory / "set", [5, 4], "test", (4, 4), classes=2)
    image = torch.from_numpy(noise(4, 4, seed=WEAK))[None].double() / 255
    export = directory / "broken.safetensors"
    save_export(broken_model(image), export)
    return ["--model", str(export), "--data", shards]


def test_a_broken_model_is_caught_with_k_assumed_to_be_one(
    broken: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and one line with the sample; the files hold a change inside the radius."""
    with pytest.raises(SystemExit) as stopped:
        main([*broken, *QUICK, "--out", str(tmp_path), "--assume-lipschitz", "1"])
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert "NO CERTIFICATE: K = 1 is assumed" in said.out
    failure = said.err.strip().splitlines()[-1]
    assert failure.startswith("failed: ") and "test-000000.tar: 000003" in failure
    written = json.loads((tmp_path / "attack.json").read_text())
    assert written["lipschitz_assumed"] and written["lipschitz_bound"] == 1.0
    first = written["violations"][0]
    assert first["sample"] == WEAK and first["name"].endswith("test-000000.tar: 000003")
    assert first["distance"] <= first["radius"] and first["label_before"] != first["label_after"]
    with np.load(tmp_path / "violations.npz") as stored:
        assert stored["samples"].tolist() == [entry["sample"] for entry in written["violations"]]
        model = load_model(broken[1]).double()
        before, after = (torch.from_numpy(stored[name]) for name in ("images", "attacked"))
        assert model(before).argmax(1).tolist() == stored["labels"].tolist()
        assert model(after).argmax(1).tolist() == stored["predictions"].tolist()
        distances = (after - before).flatten(1).norm(dim=1).numpy()
        np.testing.assert_allclose(distances, stored["distances"], rtol=1e-12)
        assert (distances <= stored["radii"]).all()
        assert (stored["labels"] != stored["predictions"]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attack.json", "violations.npz"]


def test_the_same_model_passes_with_its_own_bound(
    broken: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K is 1.05, nothing is found, and no file of an earlier attack stays."""
    (tmp_path / "violations.npz").write_bytes(b"of an earlier attack")
    main([*broken, *QUICK, "--out", str(tmp_path), "--radii", "0.01", "36/255"])
    written = json.loads((tmp_path / "attack.json").read_text())
    assert written["violations"] == [] and not written["lipschitz_assumed"]
    assert written["lipschitz_bound"] == pytest.approx(1.05, abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attack.json", "attacked.npz"]
    assert list(written["radii"]) == ["0.01", repr(36 / 255)]
    for found in written["radii"].values():
        assert found["certified"] <= found["robust"] <= written["clean_accuracy"]
        assert found["interval"][0] <= found["robust"] <= found["interval"][1]
    assert written["attacked"] == 9 and written["attacks_inside_the_radius"] == 18
    assert "samples that change inside it: 0" in capsys.readouterr().out


@pytest.mark.slow
def test_an_attack_is_added_to_the_report_of_its_certificate(
    broken: list[str], tmp_path: Path
) -> None:
    """Whichever command runs last; an attack that assumed K is not."""
    report, out = tmp_path / "report.html", ["--out", str(tmp_path)]
    main([*broken, *QUICK, *out])
    assert not report.exists()
    certify([*broken, *out])
    attacked = report.read_bytes()
    report.unlink()
    main([*broken, *QUICK, *out])
    assert report.read_bytes() == attacked
    with pytest.raises(SystemExit):
        main([*broken, *QUICK, *out, "--assume-lipschitz", "1"])
    assert report.read_bytes() == attacked
    certify([*broken, *out])
    for words in (b"Under attack", b"Attacks beyond the radius", b"No attack succeeded"):
        assert words in attacked and words not in report.read_bytes()


def test_a_certificate_that_lacks_keys_is_a_warning(
    broken: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack is written; pictures and report stay as they are."""
    certify([*broken, "--out", str(tmp_path)])
    path = tmp_path / "certificate.json"
    facts = json.loads(path.read_text())
    del facts["histogram"]
    path.write_text(json.dumps(facts))
    before = {name: (tmp_path / name).read_bytes() for name in ("report.html", "cra.png")}
    capsys.readouterr()
    main([*broken, *QUICK, "--out", str(tmp_path), "--samples", "3"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/report.html is not changed: ")
    assert "histogram" in line and (tmp_path / "attack.json").exists()
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_some_samples_evenly_spaced(broken: list[str], tmp_path: Path) -> None:
    """Three of nine are 0, 3 and 6, and what they get does not depend on the others."""
    for name, choice in (("all", []), ("some", ["--samples", "3"])):
        with pytest.raises(SystemExit):
            out = ["--out", str(tmp_path / name)]
            main([*broken, *QUICK, *choice, *out, "--assume-lipschitz", "1", "--methods", "pgd"])
    some, every = (
        json.loads((tmp_path / name / "attack.json").read_text()) for name in ("some", "all")
    )
    assert some["attacked"] == 3 and some["attacks_inside_the_radius"] == 3
    expected = [entry for entry in every["violations"] if entry["sample"] % 3 == 0]
    assert [entry["sample"] for entry in some["violations"]] == [e["sample"] for e in expected]
    for one, other in zip(some["violations"], expected, strict=True):
        assert one["distance"] == pytest.approx(other["distance"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", "10"], "--samples 10: must be 1 to 9"),
        (["--steps", "0"], "argument --steps: 0 must be a whole number from 1"),
        (["--inside", "1.5"], "argument --inside: 1.5 must be a number above 0 and at most 1"),
        (["--assume-lipschitz", "0"], "argument --assume-lipschitz: 0 must"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(
    broken: list[str],
    tmp_path: Path,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*broken, "--out", str(tmp_path / "out"), *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "out").exists()


def exit_code(rank: int, world_size: int, arguments: list[str]) -> object:
    """Of the command, run by each of several processes."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path: Path, broken: list[str]) -> None:
    """600 images in three chunks: the same bytes and the same exit code."""
    shards = write_set(tmp_path / "set", [350, 250], "test", (4, 4), classes=2)
    arguments = [*broken[:2], "--data", shards, *QUICK, "--assume-lipschitz", "1", "--device=cpu"]
    assert exit_code(0, 1, [*arguments, "--out", str(tmp_path / "1")]) == 1
    assert run_processes(2, exit_code, [*arguments, "--out", str(tmp_path / "2")]) == [1, 1]
    for out in (tmp_path / "1", tmp_path / "2"):
        assert sorted(path.name for path in out.iterdir()) == ["attack.json", "violations.npz"]
    content = (tmp_path / "1" / "attack.json").read_bytes()
    assert content == (tmp_path / "2" / "attack.json").read_bytes()
    written = json.loads(content)
    assert written["attacked"] == 600 and len(written["violations"]) > 1
