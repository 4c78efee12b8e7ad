"""Checkpoints in DeepSpeed's own format: resumed exactly, read by its tool, converted both ways."""

import csv
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from engine_runs import (
    ROUNDING,
    SMOOTH,
    STEPS,
    ULP,
    Configurations,
    Visit,
    assert_same_bits,
    checkpoint_content,
    continue_each,
    continue_run,
    joined,
    rounding_alone,
    stored,
    tensor_errors,
    train,
)
from gloo import run_processes
from launch_commands import PATIENCE, ROOT
from test_parallel_moving import named

from lipnext_scale.certify.__main__ import main as certify
from lipnext_scale.checkpoint import latest_checkpoint
from lipnext_scale.checkpoint.integrity import digest_on_disk, read_sums, sums_of
from lipnext_scale.convert_checkpoint import main as convert
from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.models.naming import named_parts
from lipnext_scale.parallel.zero_reader import ModelStates
from lipnext_scale.run_directory import RunDirectory
from lipnext_scale.weights import load_run_model

pytestmark = pytest.mark.slow

ZERO = {
    stage: [*SMOOTH, "parallel.engine=deepspeed", f"parallel.zero_stage={stage}"]
    for stage in (1, 2, 3)
}
THEIRS = ["run.checkpoint_format=deepspeed", "run.keep_checkpoints=1"]
OFFLOAD, BF16 = "parallel.offload_optimizer=true", "parallel.precision=bf16"
HALF = 10
STOPPED: Configurations = {
    "1": ZERO[1],
    "1 bf16": [*ZERO[1], BF16],
    "2 offloaded bf16": [*ZERO[2], OFFLOAD, BF16],
    "3": ZERO[3],
    "3 bf16": [*ZERO[3], BF16],
}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero checkpoints")


@pytest.fixture(scope="module")
def halves(directory: Path) -> dict[str, list[Visit]]:
    """Half of each run on two ranks, in DeepSpeed's format; beside it all of it, in ours."""
    jobs = [(directory / n, HALF, [*o, *THEIRS]) for n, o in STOPPED.items()]
    jobs += [(directory / f"{n} straight", STEPS, o) for n, o in STOPPED.items()]
    jobs += [(directory / "3 ours", HALF, ZERO[3])]
    ranks = run_processes(2, continue_each, jobs, timeout=300)
    return {job[0].name: [visits[i] for visits in ranks] for i, job in enumerate(jobs)}


def copied(directory: Path, name: str, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(directory / name, run, symlinks=True)
    return run


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_stopping_and_resuming_changes_no_bit(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path
) -> None:
    """All is found that was left; the end is that of a run that never stopped."""
    runs = {name: tmp_path / name for name in STOPPED}
    for name, run in runs.items():
        shutil.copytree(directory / name, run)
    jobs = [(run, STEPS, [*STOPPED[name], *THEIRS]) for name, run in runs.items()]
    ranks = run_processes(2, continue_each, jobs, timeout=200)
    for index, (name, run) in enumerate(runs.items()):
        visits = [rank[index] for rank in ranks]
        found, left = (joined([getattr(v, key) for v in visits]) for key in ("found", "left"))
        assert_same_bits(found, joined([visit.left for visit in halves[name]]))
        assert [visit.first_step for visit in visits] == [HALF, HALF]
        assert visits[0].counters["steps"] == {HALF}
        assert_same_bits(left, joined([visit.left for visit in halves[f"{name} straight"]]))
        # One checkpoint stays, and `latest` is what DeepSpeed expects: its name.
        kept = run / "checkpoints_deepspeed"
        assert (kept / "latest").read_text() == f"step-0000000{STEPS}"
        assert [path.name for path in kept.glob("step-*")] == [f"step-0000000{STEPS}"]


@pytest.mark.parametrize("name", STOPPED)
def test_deepspeeds_files_become_ours_bit_for_bit(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path, name: str
) -> None:
    """Weights, moments, buffers, slow weights; what beside tensors is said of the run."""
    run = copied(directory, name, tmp_path)
    convert([str(run), "--to", "native"])
    facts, tensors = stored(run)
    assert_same_bits(tensors, joined([visit.left for visit in halves[name]]))
    expected = stored(directory / "3 ours")[0]
    assert {**facts, "rng": None} == {**expected, "rng": None}


# Several conversions by DeepSpeed's tool, each as if it were started for it: its import is slow.
TOOL = """
import runpy, sys
for source, out in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.argv = ["zero_to_fp32.py", source, out]
    runpy.run_path(f"{source}/zero_to_fp32.py", run_name="__main__")
"""


def test_deepspeeds_own_tool_reads_the_weights(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path
) -> None:
    """zero_to_fp32.py, which DeepSpeed puts there, finds the float32 weights of the run."""
    names = ["1", "3 bf16"]
    sources = [directory / name / "checkpoints_deepspeed" for name in names]
    pairs = [str(p) for name, s in zip(names, sources, strict=True) for p in (s, tmp_path / name)]
    done = subprocess.run(
        [sys.executable, "-c", TOOL, *pairs], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    for name, source in zip(names, sources, strict=True):
        weights = torch.load(tmp_path / name / "pytorch_model.bin", weights_only=True)
        states = ModelStates.read(source / f"step-0000000{HALF}")
        model = LipNeXt(in_banks(RunDirectory(directory / name), states))
        for parameter, tensor in model.named_parameters():
            tensor.data.copy_(weights[f"model.{parameter}"])
        read = {part.name: part.of(part.parameter).detach() for part in named_parts(model)}
        assert_same_bits(read, named(joined([v.left for v in halves[name]]), "model"))


def in_banks(directory: RunDirectory, states: ModelStates) -> LipNeXtConfig:
    """The architecture in the banks of a checkpoint."""
    config = directory.recipe().model
    first = next(shape for name, shape in states.shapes[0].items() if name.endswith(".bank"))
    return replace(config, blocks_per_bank=first[0] // 2)


def certificate_of(run: Path) -> tuple[dict[str, float], list[dict[str, str]]]:
    """(figures, samples)"""
    with (run / "samples.csv").open() as file:
        return json.loads((run / "certificate.json").read_text()), list(csv.DictReader(file))


def test_zero_3_on_two_ranks_is_converted_goes_on_under_fsdp_on_four_and_is_certified(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path
) -> None:
    """Ten steps here and ten there are twenty of one process, and so is the certificate."""
    run, alone = copied(directory, "3", tmp_path), tmp_path / "alone"
    done = command("lipnext_scale.convert_checkpoint", str(run), "--to", "native")
    assert done.returncode == 0, done.stderr
    run_processes(4, continue_each, [(run, STEPS, [*SMOOTH, "parallel.engine=fsdp"])])
    continue_run(alone, STEPS, *SMOOTH)
    single = train(tmp_path / "single", *SMOOTH)
    rounding = rounding_alone(tmp_path, single)
    (facts, ours), (expected_facts, expected) = stored(run), stored(alone)
    errors = tensor_errors(ours, expected)
    for kind, error in errors.items():
        assert error <= ROUNDING * max(rounding[kind], ULP), kind
    assert {**facts, "rng": None} == {**expected_facts, "rng": None}
    done = command("lipnext_scale.certify", "--run", str(run))
    assert done.returncode == 0, done.stderr
    certify(["--run", str(alone)])
    figures, samples = certificate_of(run)
    expected_figures, expected_samples = certificate_of(alone)
    assert figures["certified_accuracy"] == expected_figures["certified_accuracy"]
    assert len(samples) == len(expected_samples) == 1437
    for mine, theirs in zip(samples, expected_samples, strict=True):
        assert mine["prediction"] == theirs["prediction"]
        assert float(mine["radius"]) == pytest.approx(float(theirs["radius"]), abs=1e-4)


SKIPPED = {"count": 1, "missing": 1}


def with_a_skipped_step(checkpoint: Path) -> None:
    """As if one of its steps had made no update."""
    path, sums = checkpoint / "facts.json", checkpoint / "SHA256SUMS"
    digests = read_sums(sums)
    path.write_text(json.dumps({**json.loads(path.read_text()), "non_finite": SKIPPED}))
    sums.write_bytes(sums_of({**digests, path.name: digest_on_disk(path)}))


def convert_on_all(rank: int, world_size: int, run: Path, stage: int) -> None:
    convert([str(run), "--to", "deepspeed", f"parallel.zero_stage={stage}"])


def test_ours_become_deepspeeds_for_any_ranks_and_stage_and_come_back(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path
) -> None:
    """On four ranks of ZeRO-2, which pads six matrices; and by the command, on two of ZeRO-1, in
    place of the former."""
    run = copied(directory, "3 ours", tmp_path)
    with_a_skipped_step(run / "checkpoints" / f"step-0000000{HALF}")
    facts, tensors = stored(run)
    assert facts["non_finite"] == SKIPPED
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    order = ["lipnext_scale.convert_checkpoint", str(run), "--to", "deepspeed"]
    for stage, ranks in ((2, 4), (1, 2)):
        if ranks == 4:
            run_processes(ranks, convert_on_all, run, stage)
        else:
            done = command(*torchrun, *order, f"parallel.zero_stage={stage}")
            assert done.returncode == 0, done.stderr
        states = ModelStates.read(run / "checkpoints_deepspeed" / f"step-0000000{HALF}")
        assert (states.stage, states.ranks) == (stage, ranks)
        shutil.rmtree(run / "checkpoints")
        convert([str(run), "--to", "native"])
        ended, back = stored(run)
        assert ended == facts
        assert_same_bits(back, tensors)


def test_a_run_of_ours_goes_on_in_deepspeeds_format(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path
) -> None:
    """What the conversion writes DeepSpeed takes up; the end is that of a run that never moved."""
    run = copied(directory, "3 ours", tmp_path)
    with pytest.raises(UserError, match="torchrun --nproc-per-node N -m lipnext_scale.convert_"):
        RunDirectory(run).newest_checkpoint("deepspeed")
    run_processes(2, convert_on_all, run, 3)
    ranks = run_processes(2, continue_each, [(run, STEPS, [*ZERO[3], *THEIRS])])
    found, left = (joined([getattr(v, key) for [v] in ranks]) for key in ("found", "left"))
    assert_same_bits(found, joined([visit.left for visit in halves["3 ours"]]))
    assert_same_bits(left, joined([visit.left for visit in halves["3 straight"]]))


def refused(rank: int, world_size: int, run: Path, overrides: list[str]) -> str:
    with pytest.raises(UserError) as refusal:
        continue_run(run, STEPS, *overrides)
    return str(refusal.value)


def test_what_cannot_go_on_names_the_command(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path
) -> None:
    """Another number of ranks, another format, another engine; a model that is asked for."""
    run = directory / "3"
    there = run / "checkpoints_deepspeed" / f"step-0000000{HALF}"
    convert_line = f"python -m lipnext_scale.convert_checkpoint {run} --to native"
    [message] = run_processes(1, refused, run, [*ZERO[3], *THEIRS])
    assert message == (
        f"{there}: is of ZeRO-3 on 2 process(es), this is ZeRO-3 on 1; with "
        f"run.checkpoint_format = 'native' any goes on, after {convert_line}"
    )
    expected = (
        f"{run}: its newest checkpoint, of step {HALF}, is in deepspeed format, not in native: "
        + convert_line
    )
    banks = [*ZERO[3], *THEIRS, "model.blocks_per_bank=1"]
    for message in run_processes(2, refused, run, banks):
        assert message.startswith(f"{there}: has its matrices in other banks (model.blocks_per_")
    assert refused(0, 1, run, SMOOTH) == expected
    with pytest.raises(UserError) as refusal:
        load_run_model(RunDirectory(run))  # as certify, attack and export do
    assert str(refusal.value) == expected


def test_a_conversion_is_refused_in_a_line(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Nothing to convert, already there, a damaged file, a missing rank: nothing is written."""

    def said(run: Path, to: str = "native") -> str:
        with pytest.raises(SystemExit) as end:
            convert([str(run), "--to", to])
        assert end.value.code == 2
        return capsys.readouterr().err

    ours, run = directory / "3 ours", copied(directory, "3", tmp_path)
    assert said(ours) == f"error: {ours}: has no checkpoint in deepspeed format\n"
    there = run / "checkpoints_deepspeed" / f"step-0000000{HALF}"
    file = there / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    assert said(run).startswith(f"error: {file}: is not a file of a DeepSpeed checkpoint: ")
    file.unlink()
    assert said(run) == f"error: {file}: cannot be read: No such file or directory\n"
    assert latest_checkpoint(run / "checkpoints") is None
    file.write_bytes(whole)
    convert([str(run), "--to", "native"])
    capsys.readouterr()
    done = run / "checkpoints" / there.name
    other = there / "mp_rank_00_model_states.pt"
    shutil.copy(there / f"zero_pp_rank_0_{other.name}", other)
    shutil.move(done, tmp_path / "done")
    assert said(run).startswith(f"error: {there}: holds files of ZeRO-3 and of another stage")
    other.unlink()
    shutil.move(tmp_path / "done", done)
    assert said(run) == f"error: {done}: is there already, and {there} is no newer\n"
    checkpoint_content(done)


class RunsCode:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


def test_a_file_that_would_run_code_is_refused(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path
) -> None:
    """A pickle may name any function; the ones that are not of tensors are not called. Every file
    that DeepSpeed would read on any rank is looked at before."""
    run, trace = copied(directory, "3", tmp_path), tmp_path / "trace"
    pickle.loads(pickle.dumps(RunsCode(trace)))
    assert trace.exists()  # it is what it claims to be
    trace.unlink()
    for name in ("0_mp_rank_00_optim_states", "1_mp_rank_00_model_states"):
        file = run / f"checkpoints_deepspeed/step-0000000{HALF}/zero_pp_rank_{name}.pt"
        whole = file.read_bytes()
        torch.save({"optimizer_state_dict": RunsCode(trace)}, file)
        if "optim" in name:  # a conversion reads no other model states than the first rank's
            with pytest.raises(SystemExit):
                convert([str(run), "--to", "native"])
        ranks = run_processes(2, refused, run, [*ZERO[3], *THEIRS])
        assert all(f"{file}: is not a file of a DeepSpeed checkpoint" in said for said in ranks)
        file.write_bytes(whole)
    assert not trace.exists()


def test_a_run_that_goes_on_is_not_converted(
    halves: dict[str, list[Visit]], directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """It would remove what is being read."""
    run = copied(directory, "3", tmp_path)
    program = "import sys; from lipnext_scale.run_directory import RunDirectory\n"
    program += "RunDirectory(sys.argv[1]).lock.take(); print('taken', flush=True); input()"
    holder = [sys.executable, "-c", program, str(run)]
    with subprocess.Popen(holder, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "taken\n"
        with pytest.raises(SystemExit) as end:
            convert([str(run), "--to", "native"])
        process.kill()
    assert end.value.code == 2 and "is in use by process" in capsys.readouterr().err
    assert latest_checkpoint(run / "checkpoints") is None
    convert([str(run), "--to", "native"])
