"""python -m lipnext_scale.bench gpu, tried on a CPU; and what a run says of its kernels."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lipnext_scale.bench import main
from lipnext_scale.checks import gpu
from lipnext_scale.distributed import Engine, ParallelConfig
from lipnext_scale.models import LipNeXt, LipNeXtConfig

DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.yaml")
SMALL = ["model.depth=2", "model.width=32", "data.batch_size=16", "parallel.accumulation=2"]
KERNELS = ["split_left", "split_right", "scaled_cast", "moments", "tail_operands", "change_right"]
KERNELS += ["shift", "activate", "activate_backward"]


def bench(tmp_path: Path, *more: str) -> dict:
    out = tmp_path / "gpu.json"
    main(["gpu", "--config", DIGITS, "--device", "cpu", "--out", str(out), *more, *SMALL])
    return json.loads(out.read_text())


def test_every_figure_is_there(tmp_path, capsys):
    walked = {"forward": 1, "backward": 2, "norm": 0.5, "manifold": 3, "nadam": 0.25, "step": 0.25}
    (tmp_path / "walk.json").write_text(json.dumps({"milliseconds": walked}))
    found = bench(tmp_path, "--ranks", "2", "--predicted", str(tmp_path / "walk.json"))
    assert found["device"] == "cpu" and found["width"] == 32 and found["images"] == 8
    assert found["torch"] == torch.__version__ and not torch.backends.cuda.matmul.allow_tf32
    for name in KERNELS:
        assert found[f"kernel_{name}_agrees"] is True and found[f"kernel_{name}_gb_per_second"] > 0
    for name in ("fp32", "tf32", "bf16", "bf16_to_fp32", "bf16x3", "bf16x3_added", "bf16_tokens"):
        assert found[f"product_{name}_tflops"] > 0
    assert found["product_bf16x3_relative_error"] < 2**-15
    phases = [found[f"step_{name}_ms"] for name in ("forward", "backward", "norm", "optimizers")]
    assert 0 < sum(phases) < found["step_all_ms"]
    assert found["step_all_predicted_ms"] == 7 and found["step_optimizers_predicted_ms"] == 3.25
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed.keys() == found.keys()


def test_a_kernel_that_differs_ends_it_after_the_file_is_written(tmp_path, capsys, monkeypatch):
    split, calls = gpu.step_kernels.split_left, []

    def other(x: torch.Tensor, lo: int) -> torch.Tensor:
        calls.append(x)
        return split(x, lo) * (1 + len(calls) % 2)

    monkeypatch.setattr(gpu.step_kernels, "split_left", other)
    with pytest.raises(SystemExit) as ended:
        bench(tmp_path)
    assert ended.value.code == 1 and "kernel_split_left_agrees" in capsys.readouterr().err
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [name for name, value in found.items() if value is False] == ["kernel_split_left_agrees"]


def test_a_run_says_why_its_blocks_have_no_kernels():
    def why(device: str = "cuda", compiled: bool = False, **model: str) -> str | None:
        processes = SimpleNamespace(device=torch.device(device))
        engine = Engine(ParallelConfig(compile=compiled), processes)  # type: ignore[arg-type]
        with torch.device("meta"):
            engine.model = LipNeXt(LipNeXtConfig(depth=1, width=64, patch_size=4, **model))
        with FakeTensorMode():
            return engine.why_plain()

    assert why("cpu") is None and why("cpu", activation="minmax") is None
    assert why(activation="minmax") == "activation minmax has no kernel"
    assert why(compiled=True) == "torch.compile makes its own (parallel.compile)"
