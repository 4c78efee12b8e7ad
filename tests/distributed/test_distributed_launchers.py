"""Every engine, and every launcher, as users start them."""

import json
import sys
from pathlib import Path

import pytest
from launch_commands import (
    SETTINGS,
    accelerate_launch,
    deepspeed_launch,
    free_port,
    needs,
    train,
)

from lipnext_scale.observe.metrics import read_records
from lipnext_scale.train import main

pytestmark = pytest.mark.slow

STEPS = 4  # enough to see that it is the same run
# What the introduction says of an engine.
ENGINES = {
    "ddp": "2 × cpu (ddp, fp32)",
    "fsdp2": "2 × cpu (fsdp 1 × 2, bank layout, fp32)",
    "deepspeed_zero1": "2 × cpu (deepspeed ZeRO-1 × 2, fp32)",
    "deepspeed_zero2": "2 × cpu (deepspeed ZeRO-2 × 2, fp32)",
    "deepspeed_zero3": "2 × cpu (deepspeed ZeRO-3 × 2, fp32)",
}
ZERO = {stage: ["parallel.engine=deepspeed", f"parallel.zero_stage={stage}"] for stage in (1, 2, 3)}
PROGRAM = "tests/distributed/started_runs.py"


def few(directory: Path) -> list[str]:
    return [f"run.dir={directory}", f"run.max_steps={STEPS}"]


def losses(directory: Path) -> list[float]:
    records = read_records(directory / "metrics.jsonl")
    return [record["train/loss"] for record in records if "train/loss" in record]


def introductions(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("LipNeXt L2W16")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, within this one."""
    directory = tmp_path_factory.mktemp("launchers") / "run"
    main([*SETTINGS, *few(directory)])
    assert len(losses(directory)) == STEPS
    return losses(directory)


@needs("deepspeed")
def test_torchrun_starts_every_engine(tmp_path: Path, expected: list[float]) -> None:
    """That of the configuration: each is named once, and has the losses of one process."""
    runs = {f"deepspeed_zero{stage}": words for stage, words in ZERO.items()}
    runs |= {"fsdp2": ["parallel.engine=fsdp"], "ddp": ["parallel.engine=ddp"]}
    file = tmp_path / "runs.json"
    arguments = [[*SETTINGS, *few(tmp_path / name), *words] for name, words in runs.items()]
    file.write_text(json.dumps(arguments))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = train([*launcher, "--nproc-per-node", "2", PROGRAM, str(file)], settings=[])
    assert done.returncode == 0, done.stderr
    for name, line in zip(runs, introductions(done.stdout), strict=True):
        assert f" on {ENGINES[name]}, 120 steps" in line
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-5)


@needs("deepspeed")
def test_deepspeed_starts_the_command(tmp_path: Path, expected: list[float]) -> None:
    """The training module itself, with a file for its engine."""
    words = ["--deepspeed_config", "launch/deepspeed/zero2.json", *few(tmp_path / "run")]
    done = train([*deepspeed_launch(), "--module", "lipnext_scale.train"], *words)
    assert done.returncode == 0, done.stderr
    (line,) = introductions(done.stdout)
    assert f" on {ENGINES['deepspeed_zero2']}, 120 steps" in line
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


@needs("accelerate")
@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero3"])
def test_accelerates_file_chooses_the_engine(
    name: str, tmp_path: Path, expected: list[float]
) -> None:
    """The first line names the engine in effect; the losses are those of all engines."""
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    flags = ["--config_file", f"launch/accelerate/{name}.yaml", "--num_processes", "2"]
    launcher = accelerate_launch(*flags, "--main_process_port", str(free_port()))
    done = train(launcher, *few(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (line,) = introductions(done.stdout)
    assert f" on {ENGINES[name]}, 120 steps" in line
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


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
    assert done.stderr.count(f"error: {message}") == 1, done.stderr
    assert 'File "' not in done.stderr.partition("error: ")[0]
    assert not (tmp_path / "run").exists()
