"""The plan command: shapes, balance and bytes of runs that no test machine could hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lipnext_scale.optim import local_part
from lipnext_scale.parallel import build_engine
from lipnext_scale.parallel.estimate import estimate
from lipnext_scale.parallel.pieces import local_range
from lipnext_scale.plan import fake_group, main, plan
from lipnext_scale.recipe import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
ONE, TWO = (str(ROOT / "configs" / f"imagenet_{size}.yaml") for size in ("1b", "2b"))
DIGITS = str(ROOT / "configs" / "digits.yaml")
FP32 = ["parallel.precision=fp32", "parallel.reshard_after_forward=true"]


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    assert not dist.is_initialized()
    return capsys.readouterr().out


# ---- what is printed -----------------------------------------------------------------------------

EIGHT = """\
LipNeXt L32W4096: 1,073,741,824 orthogonal parameters
8 processes: fsdp 1 × 8, bank layout, fp32
batch of 256: 32 images a process

whole → on rank 0
8 groups of blocks with
    bank [8, 4096, 4096] → [1, 4096, 4096]
    bias [4, 4096] → [1, 4096]
    pos [4, 14, 14, 1] → [1, 14, 14, 1]
head with
    weight [1000, 4096] → [125, 4096]
    bias [1000] → [125]

on each rank, GB (kept: parameters, gradients and optimizer. Activations come on top)
  ranks  matrices  parameters  gradients  optimizer      kept  gathered
  0-7        8.00       0.539      0.539      2.154     3.232     1.090

sent by each rank in a step, GB
  ranks  all-gather  reduce-scatter      sent
  0-7         7.532           3.773    11.306

kept: 3.232 GB on the fullest rank, 3.232 on average (0.0 % above), 3.232 on the emptiest
"""


def test_a_billion_parameters_on_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank has one of a group's eight matrices, and the same to do as any other."""
    assert run_plan(capsys, "--config", ONE, "--ranks", "8", *FP32) == EIGHT


def test_a_billion_parameters_on_eight_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes replicate, so a rank holds what it did on one node, and an all-reduce is added."""
    told = run_plan(capsys, "--config", ONE, "--ranks", "64", *FP32)
    assert "64 processes: fsdp 8 × 8" in told and "4 images a process" in told
    assert "    bank [8, 4096, 4096] → [1, 4096, 4096]\n" in told
    assert "  0-63        7.532           3.773       0.943    12.249\n" in told


@pytest.mark.slow
def test_rows_over_64_ranks() -> None:
    """64 rows of each matrix on every rank, a matrix owned by each, and nobody far from another."""
    settings = ["parallel.weight_layout=row", "parallel.shard_size=64"]
    described, estimates = plan(load_recipe(ONE, settings), 64, 8)
    assert "fsdp 1 × 64, row layout" in described
    assert "    4 × matrices [4096, 4096] → [64, 4096]\n" in described
    assert [e.matrices for e in estimates] == [1] * 64
    assert max(e.kept for e in estimates) < 1.01 * min(e.kept for e in estimates)
    assert all(e.all_to_all > 0 and e.buffers > 0 and e.all_reduce == 0 for e in estimates)


def test_two_billion_parameters_on_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    told = run_plan(capsys, "--config", TWO, "--ranks", "16")
    assert "LipNeXt L32W5792: 2,147,024,896 orthogonal parameters" in told
    assert "16 processes: fsdp 2 × 8" in told
    assert "    bank [8, 5792, 5792] → [1, 5792, 5792]\n" in told


def test_ranks_that_differ_have_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """14 matrices on 16 ranks: two have none, and what that costs the others is said."""
    arguments = ["--config", ONE, "--ranks", "16", "--ranks-per-node", "16", "model.depth=7"]
    told = run_plan(capsys, *arguments, *FP32)
    assert "\n  0-13       1.00 " in told and "\n  14-15      0.00 " in told
    assert "(9.0 % above)" in told


def test_small_models_are_told_in_small_units(capsys: pytest.CaptureFixture[str]) -> None:
    """No column of zeros: kB and MB where GB would be, nothing where nothing is sent."""
    told = run_plan(capsys, "--config", DIGITS, "--ranks", "1", "parallel.accumulation=2")
    assert "1 process: single, fp32" in told and "64 images a process, in 2 parts" in told
    assert "on each rank, MB" in told and "nothing is sent" in told and "gathered" not in told
    tiny = ["model.width=16", "parallel.engine=ddp"]
    told = run_plan(capsys, "--config", DIGITS, "--ranks", "2", *tiny)
    assert "on each rank, kB" in told and "all-reduce" in told and "all-gather" not in told


def test_lines_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Also with every column that there is."""
    settings = ["parallel.weight_layout=row", "model.depth=3", "model.width=64"]
    told = run_plan(capsys, "--config", DIGITS, "--ranks", "16", *settings)
    assert "buffers" in told and "all-reduce" in told and "all-to-all" in told
    assert max(map(len, told.splitlines())) <= 100


# ---- what is planned -----------------------------------------------------------------------------


def shares(recipe: Recipe, ranks: int, rank: int) -> tuple[int, int, list[tuple[int, ...]]]:
    """(numbers that the rank has, numbers of the model, the local shapes of its banks)."""
    with fake_group(rank, ranks):
        model = build_engine(recipe.parallel, "cpu", 8).place(recipe.model)
        parameters = list(model.parameters())
        assert all(p.is_meta and local_part(p).is_meta for p in parameters)
        banks = [group.bank for group in model.block_groups()]
        assert all(local_range(bank) == (rank, rank + 1) for bank in banks)
        return (
            sum(local_part(p).numel() for p in parameters),
            sum(p.numel() for p in parameters),
            [tuple(local_part(bank).shape) for bank in banks],
        )


def test_the_ranks_share_the_model_without_rest_or_overlap() -> None:
    """The r-th of eight has the r-th matrix of every bank; all together have every parameter."""
    recipe = load_recipe(ONE)
    had = [shares(recipe, 8, rank) for rank in range(8)]
    assert {shape for _, _, shapes in had for shape in shapes} == {(1, 4096, 4096)}
    assert sum(numbers for numbers, _, _ in had) == had[0][1] > 2**30


def test_replicas_are_alike() -> None:
    """A rank's estimate is that of its fellow in the first replica, from which it is taken."""
    recipe = load_recipe(DIGITS, ["parallel.shard_size=3", "data.batch_size=60", "model.depth=4"])
    _, estimates = plan(recipe, 6, 6)
    for rank in range(6):
        with fake_group(rank, 6):
            engine = build_engine(recipe.parallel, "cpu", 6)
            own = estimate(engine, engine.place(recipe.model), recipe.optim)
        assert estimates[rank] == own
    assert estimates[0] != estimates[2]


# ---- as a command --------------------------------------------------------------------------------

MEASURED = """
import resource, sys
from lipnext_scale.plan import main
main(sys.argv[1:])
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_nothing_is_in_memory() -> None:
    """The process that plans 8 GB of weights for 16 ranks never has one gigabyte."""
    done = command("-c", MEASURED, "--config", TWO, "--ranks", "16")
    assert done.returncode == 0 and "kept: " in done.stdout
    assert int(done.stderr.split()[-1]) < 1e9


@pytest.mark.slow
def test_the_command_of_the_readme() -> None:
    done = command("-m", "lipnext_scale.plan", "--config", ONE, "--ranks", "8", *FP32)
    assert (done.returncode, done.stdout) == (0, EIGHT)


MISTAKES = [
    (["--ranks", "0"], "--ranks 0: must be at least 1"),
    (["--ranks", "x"], "argument --ranks: invalid int value: 'x'"),
    ([], "the following arguments are required: --ranks"),
    (["--ranks", "8", "--ranks-per-node", "-1"], "--ranks-per-node -1: must be at least 1"),
    (["--ranks", "8", "--nodes", "2"], "unrecognized arguments: --nodes"),
    (["--ranks", "3"], "data.batch_size = 256: must be a multiple of 3 process"),
    (["--ranks", "8", "parallel.shard_size=3"], "parallel.shard_size = 3: must divide"),
    (["--ranks", "8", "parallel.engine=single"], "parallel.engine = 'single': 8 processes"),
    (
        ["--ranks", "8", "parallel.engine=deepspeed"],
        "parallel.engine = 'deepspeed': is not planned",
    ),
    (["--ranks", "8", "model.widht=64"], "model.widht = 64: unknown key; did you mean model.width"),
    (["--ranks", "8", "parallel"], "argument 'parallel': must have the form section.key=value"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_told_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, and no process group or half a plan left behind."""
    with pytest.raises(SystemExit) as end:
        main(["--config", ONE, *arguments])
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_missing_file_is_told_in_a_line() -> None:
    """By the command itself."""
    done = command("-m", "lipnext_scale.plan", "--config", "configs/imagenet_1.yaml", "--ranks=8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: configs/imagenet_1.yaml: no such configuration file; "
        "did you mean configs/imagenet_1b.yaml?\n"
    )
