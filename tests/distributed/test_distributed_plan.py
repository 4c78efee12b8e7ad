"""The plan command: shapes, balance and bytes of runs that no test machine could hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.distributed import build_engine
from lipnext_scale.distributed.estimate import estimate
from lipnext_scale.plan import fake_group, main, plan

ROOT = Path(__file__).parents[2]
ONE, TWO = (str(ROOT / "configs" / f"imagenet_{size}.yaml") for size in ("1b", "2b"))
DIGITS = str(ROOT / "configs" / "digits.yaml")
FP32 = ["parallel.precision=fp32", "parallel.reshard_after_forward=true"]


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    assert not dist.is_initialized()
    return capsys.readouterr().out


EIGHT = """\
LipNeXt L32W4096: 1,073,741,824 orthogonal parameters
8 process(es): fsdp 1 × 8, bank layout, fp32
batch of 256: 32 image(s) a process, in 1 part(s)

on each rank (kept: parameters, gradients and optimizer; activations come on top)
  ranks  matrices  parameters  gradients  optimizer    kept  gathered
    0-7      8.00    539.0 MB   539.0 MB     2.4 GB  3.5 GB    2.2 GB

sent by each rank in a step
  ranks  all-gather  reduce-scatter     sent
    0-7      7.5 GB          3.8 GB  11.3 GB
"""


def test_a_billion_parameters_on_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank has one of a group's eight blocks, and the same to do as any other."""
    assert run_plan(capsys, "--config", ONE, "--ranks", "8", *FP32) == EIGHT


def test_a_billion_parameters_on_eight_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes replicate and share the step: a rank has one of its four blocks' state, or none of it.

    It sends what an all-reduce would; that is left for biases.
    """
    out = run_plan(capsys, "--config", ONE, "--ranks", "64", *FP32)
    assert "64 process(es): fsdp 8 × 8" in out and "4 image(s) a process" in out
    assert "   0-31      8.00    539.0 MB   539.0 MB   610.3 MB  1.7 GB" in out
    assert "  32-63      8.00    539.0 MB   539.0 MB     6.4 MB  1.1 GB" in out
    assert "   0-63      8.0 GB          4.2 GB      3.7 MB  12.2 GB\n" in out
    alone = run_plan(capsys, "--config", ONE, "--ranks", "64", *FP32, "parallel.share_step=false")
    assert "   0-63      7.5 GB          3.8 GB    943.2 MB  12.2 GB\n" in alone


@pytest.mark.slow
def test_rows_over_64_ranks() -> None:
    """64 rows of each matrix on every rank, a block owned by every second, none by the others."""
    settings = ["parallel.weight_layout=row", "parallel.shard_size=64"]
    described, estimates, _ = plan(load_recipe(ONE, settings), 64, 8)
    assert "fsdp 1 × 64, row layout" in described
    assert [e.matrices for e in estimates] == [2] * 32 + [0] * 32
    assert all(e.all_to_all > 0 and e.buffers > 0 and e.all_reduce == 0 for e in estimates)


def test_ranks_that_differ_have_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """7 blocks on 16 ranks: nine have none."""
    arguments = ["--config", ONE, "--ranks", "16", "--ranks-per-node", "16", "model.depth=7"]
    out = run_plan(capsys, *arguments, *FP32)
    assert "\n    0-6      2.00 " in out and "\n   7-14      0.00 " in out


def test_small_models_have_small_units(capsys: pytest.CaptureFixture[str]) -> None:
    """No column of zeros: kB and MB where GB would be, nothing where nothing is sent."""
    out = run_plan(capsys, "--config", DIGITS, "--ranks", "1", "parallel.accumulation=2")
    assert "1 process(es): single, fp32" in out and "64 image(s) a process, in 2 part(s)" in out
    assert " MB " in out and "nothing is sent" in out and "gathered" not in out
    tiny = ["model.width=16", "parallel.engine=ddp"]
    out = run_plan(capsys, "--config", DIGITS, "--ranks", "2", *tiny)
    assert " kB " in out and "all-reduce" in out and "all-to-all" not in out


def test_every_rank_is_planned_as_itself() -> None:
    """Though it is taken from its fellow in the first replica, which has another share."""
    recipe = load_recipe(DIGITS, ["parallel.shard_size=3", "data.batch_size=60", "model.depth=4"])
    _, estimates, _ = plan(recipe, 6, 6)
    for rank in range(6):
        with fake_group(rank, 6):
            engine = build_engine(recipe.parallel, "cpu", 6)
            own = estimate(engine, engine.place(recipe.model), recipe.optim)
        assert estimates[rank] == own
    assert estimates[0] == estimates[3]  # of two blocks, one each
    assert estimates[1].optimizer > estimates[4].optimizer  # of one


TIMES = """
products of a step, at the rates of a GPU, width 4096
  ranks  forward  backward  manifold       all
   0-31  5.26 ms  10.52 ms   7.79 ms  23.57 ms
  32-63  5.26 ms  10.52 ms   0.00 ms  15.78 ms
elementwise passes, collectives, the head, Lookahead and the loader come on top
"""


def test_products_have_times_at_measured_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight nodes that share the step: a rank steps a block or none."""
    rates = {"bf16_tokens": 320, "fp32": 50, "bf16_to_fp32": 300, "bf16x3": 100, "bf16": 310}
    file, arguments = tmp_path / "gpu.json", ["--config", ONE, "--ranks", "64", "--rates"]
    measured = {f"product_{name}_tflops": rate for name, rate in rates.items()}
    file.write_text(json.dumps({"device": "a GPU", "width": 4096, **measured}))
    assert run_plan(capsys, *arguments, str(file)).endswith(TIMES)
    with pytest.raises(SystemExit):
        main([*arguments, str(file), "optim.products=fp32"])
    assert capsys.readouterr().err.startswith("error: optim.products = 'fp32': is not timed")


MEASURED = """
import resource, sys
from lipnext_scale.plan import main
main(sys.argv[1:])
print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.slow
def test_nothing_is_in_memory() -> None:
    """The process that plans 8 GB of weights for 16 ranks never has one gigabyte."""
    command = [sys.executable, "-c", MEASURED, "--config", TWO, "--ranks", "16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "kept: " in done.stdout
    assert int(done.stderr.split()[-1]) < 1e9


MISTAKES = [
    (["--ranks", "0"], "argument --ranks: 0 must be a whole number from 1"),
    ([], "the following arguments are required: --ranks"),
    (["--ranks", "3"], "data.batch_size = 256: must be a multiple of 3 process"),
    (["--ranks", "8", "parallel.shard_size=3"], "parallel.shard_size = 3: must divide"),
    (["--ranks", "8", "parallel.engine=deepspeed"], "parallel.engine = 'deepspeed': is not planne"),
    (["--ranks", "8", "--rates", ONE], f"--rates = {ONE!r}: must be a file that `python -m lip"),
    (["--ranks", "8", "--rates", "none.json"], "--rates = 'none.json': must be a file that"),
    (["--ranks", "8", "model.widht=64"], "model.widht = 64: unknown key; did you mean model.width"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, and no process group or half a plan left behind."""
    with pytest.raises(SystemExit) as end:
        main(["--config", ONE, *arguments])
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not dist.is_initialized()
