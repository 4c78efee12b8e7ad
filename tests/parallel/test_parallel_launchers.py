"""Every engine by every launcher, as users start them; what they say that cannot be is refused."""

import json
import sys
from pathlib import Path

import pytest
from launch_commands import (
    ROOT,
    SETTINGS,
    accelerate_launch,
    deepspeed_launch,
    free_port,
    needs,
    python,
    train,
)

from lipnext_scale.train import main

pytestmark = pytest.mark.slow

STEPS = 4  # enough to see that it is the same run
# Our file for accelerate → what the introduction says of the engine in effect.
FILES = {
    "single": "cpu (single, fp32)",
    "multi_gpu": "2 × cpu (ddp, fp32)",
    "fsdp2": "2 × cpu (fsdp 1 × 2, bank layout, fp32)",
    "deepspeed_zero1": "2 × cpu (deepspeed ZeRO-1 × 2, fp32)",
    "deepspeed_zero2": "2 × cpu (deepspeed ZeRO-2 × 2, fp32)",
    "deepspeed_zero3": "2 × cpu (deepspeed ZeRO-3 × 2, fp32)",
}
ZERO = {stage: ["parallel.engine=deepspeed", f"parallel.zero_stage={stage}"] for stage in (1, 2, 3)}
PROGRAM = "tests/parallel/started_runs.py"


def few(directory: Path) -> list[str]:
    return [f"run.dir={directory}", f"run.max_steps={STEPS}"]


def losses(directory: Path) -> list[float]:
    told = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in told if "train/loss" in record]


def introductions(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("LipNeXt L2W16")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, within this one."""
    directory = tmp_path_factory.mktemp("launchers") / "run"
    main([*SETTINGS, *few(directory)])
    assert len(losses(directory)) == STEPS
    return losses(directory)


def start_all(
    launcher: list[str], runs: dict[str, list[str]], directory: Path, expected: list[float]
) -> None:
    """Runs by name in `FILES`: each says its engine once, and has the losses of one process; its
    third step is measured, as by default."""
    file, common = directory / "runs.json", SETTINGS
    arguments = [[*common, *few(directory / name), *words] for name, words in runs.items()]
    file.write_text(json.dumps(arguments))
    done = train([*launcher, str(file)], settings=[])
    assert done.returncode == 0, done.stderr
    for name, line in zip(runs, introductions(done.stdout), strict=True):
        assert f" on {FILES[name]}, 120 steps" in line
        assert losses(directory / name) == pytest.approx(expected, abs=1e-5)


@needs("deepspeed")
def test_torchrun_starts_every_engine(tmp_path: Path, expected: list[float]) -> None:
    """The engine is the configuration's."""
    runs = {f"deepspeed_zero{stage}": words for stage, words in ZERO.items()}
    runs |= {"fsdp2": ["parallel.engine=fsdp"], "multi_gpu": ["parallel.engine=ddp"]}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start_all([*launcher, "--nproc-per-node", "2", PROGRAM], runs, tmp_path, expected)


@needs("deepspeed")
def test_deepspeed_starts_its_engine(tmp_path: Path, expected: list[float]) -> None:
    """By settings of ours, and by its file."""
    files = [["--deepspeed_config", f"launch/deepspeed/zero{stage}.json"] for stage in (1, 3)]
    runs = {"deepspeed_zero1": files[0], "deepspeed_zero2": ZERO[2], "deepspeed_zero3": files[1]}
    start_all([*deepspeed_launch(), PROGRAM], runs, tmp_path, expected)


@needs("deepspeed")
def test_deepspeed_starts_the_command(tmp_path: Path, expected: list[float]) -> None:
    """The training module itself, with a file for its engine."""
    words = ["--deepspeed_config", "launch/deepspeed/zero2.json", *few(tmp_path / "run")]
    done = train([*deepspeed_launch(), "--module", "lipnext_scale.train"], *words)
    assert done.returncode == 0, done.stderr
    (line,) = introductions(done.stdout)
    assert f" on {FILES['deepspeed_zero2']}, 120 steps" in line
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


def test_all_of_accelerates_files_are_tried() -> None:
    """One that is added is tried as well."""
    assert {path.stem for path in (ROOT / "launch/accelerate").iterdir()} == FILES.keys()


@needs("accelerate")
@pytest.mark.parametrize("name", FILES)
def test_accelerates_file_chooses_the_engine(
    name: str, tmp_path: Path, expected: list[float]
) -> None:
    """The first line names the engine in effect; the losses are those of all engines."""
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    flags = ["--config_file", f"launch/accelerate/{name}.yaml"]
    if name != "single":
        flags += ["--num_processes", "2", "--main_process_port", str(free_port())]
    words = few(tmp_path / "run")
    if name == "multi_gpu":  # of which accelerate says nothing
        words.append("parallel.engine=ddp")
    done = train(accelerate_launch(*flags), *words)
    assert done.returncode == 0, done.stderr
    (line,) = introductions(done.stdout)
    assert f" on {FILES[name]}, 120 steps" in line
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


@needs("accelerate")
@pytest.mark.parametrize(
    "flags, engine",
    [
        ([], "cpu (single, fp32)"),
        (["--multi_gpu", "--num_processes", "2"], "2 × cpu (fsdp 1 × 2, bank layout, fp32)"),
    ],
)
def test_accelerate_without_a_file(
    flags: list[str],
    engine: str,
    tmp_path: Path,
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was ever asked: the recipe decides, as with torchrun."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where accelerate's default file would be
    port = ["--main_process_port", str(free_port())] if flags else []
    done = train(accelerate_launch(*flags, *port), *few(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (line,) = introductions(done.stdout)
    assert f" on {engine}, 120 steps" in line
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


def assert_refused(error: str, message: str, directory: Path) -> None:
    """In one line, told once, and before anything is written."""
    assert error.count(f"error: {message}") == 1, error
    assert 'File "' not in error.partition("error: ")[0] and f"{ROOT}/lipnext_scale/" not in error
    assert not (directory / "run").exists()


def test_row_layout_with_zero_3_is_refused(tmp_path: Path) -> None:
    """By one process and plain python."""
    words = [*ZERO[3], "parallel.weight_layout=row"]
    done = train(python(), *few(tmp_path / "run"), *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    message = (
        "parallel.weight_layout = 'row': needs engine = 'fsdp', not 'deepspeed': its shards are "
        "flat, cut between whole matrices\n"
    )
    assert_refused(done.stderr, message, tmp_path)


@needs("deepspeed")
def test_a_partition_through_a_matrix_is_refused(tmp_path: Path) -> None:
    """By torchrun: 4 matrices on 3 processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "3", "-m", "lipnext_scale.train"]
    done = train(launcher, *few(tmp_path / "run"), *ZERO[3])
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    message = (
        "model.depth = 2: ZeRO-3 on 3 processes would cut through matrices: 2·depth = 4 is no "
        "multiple of 3; use parallel.zero_stage = 2 or parallel.engine = 'fsdp'\n"
    )
    assert_refused(done.stderr, message, tmp_path)


@needs("deepspeed")
def test_fp16_in_a_deepspeed_file_is_refused(tmp_path: Path) -> None:
    """By its own launcher, which hands on our exit code."""
    file = tmp_path / "fp16.json"
    file.write_text(json.dumps({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    launcher = [*deepspeed_launch(), "--module", "lipnext_scale.train"]
    done = train(launcher, "--deepspeed_config", str(file), *few(tmp_path / "run"))
    assert done.returncode == 2
    message = f"{file}: fp16 = {{'enabled': True}}: is not supported; use bf16\n"
    assert_refused(done.stderr, message, tmp_path)


@needs("accelerate")
@needs("deepspeed")
def test_batch_sizes_that_contradict_ours_are_refused(tmp_path: Path) -> None:
    """Those of a DeepSpeed file that accelerate's configuration names."""
    file = tmp_path / "zero2.json"
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}
    file.write_text(json.dumps({**sizes, "zero_optimization": {"stage": 2}}))
    yaml = tmp_path / "accelerate.yaml"
    lines = ["distributed_type: DEEPSPEED", "num_processes: 2", "num_machines: 1"]
    lines += ["deepspeed_config:", f"  deepspeed_config_file: {file}", "  zero3_init_flag: false"]
    yaml.write_text("\n".join(lines))
    flags = ["--config_file", str(yaml), "--main_process_port", str(free_port())]
    done = train(accelerate_launch(*flags), *few(tmp_path / "run"))
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    message = f"data.batch_size = 72: the launcher says 64 ({file}: train_batch_size = 64); make"
    assert_refused(done.stderr, message, tmp_path)


@needs("accelerate")
def test_accelerates_cpu_mode_is_not_taken_for_several_processes(tmp_path: Path) -> None:
    """It starts one of the two that were asked for: a run of another size than the user thinks."""
    flags = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    done = train(accelerate_launch(*flags, "--dynamo_backend", "no"), *few(tmp_path / "run"))
    assert done.returncode != 0 and not (tmp_path / "run").exists()
    assert "error: accelerate was asked for several processes and has started one" in done.stderr
