"""`parallel.*`: what is refused, and what engine and device the processes get."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lipnext_scale.distributed import ParallelConfig, build_engine, deepspeed, processes
from lipnext_scale.distributed.processes import (
    Processes,
    choose_device,
    fake_group,
    is_out_of_memory,
)
from lipnext_scale.models import LipNeXtConfig
from lipnext_scale.utils.config import ConfigError, from_dict

NOT = "needs engine = 'fsdp', not "
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"shard_size": -1}, "shard_size = -1: must be at least 0"),
    ({"accumulation": 0}, "accumulation = 0: must be at least 1"),
    ({"reduce_precision": "bf16"}, "reduce_precision = 'bf16': needs precision = 'bf16'; fp32"),
    ({"weight_layout": "row", "engine": "ddp"}, f"weight_layout = 'row': {NOT}'ddp', which has no"),
    ({"shard_size": 2, "engine": "single"}, f"shard_size = 2: {NOT}'single'"),
    (
        {"engine": "fdsp"},
        "engine = 'fdsp': must be one of auto, single, ddp, fsdp, deepspeed; did you mean fsdp?",
    ),
    (
        {"engine": "deepspeed", "compile": True},
        "compile = True: needs another engine than 'deepspeed'",
    ),
    ({"zero_stage": 0}, "zero_stage = 0: must be 1, 2 or 3; what stage 0 would be is engine = "),
    (
        {"offload_optimizer": True},
        "offload_optimizer = True: needs engine = 'deepspeed', not 'auto'",
    ),
]


@pytest.mark.parametrize("values, message", REFUSED, ids=[",".join(v) for v, _ in REFUSED])
def test_contradictions_are_refused_in_a_line(values: dict[str, Any], message: str) -> None:
    """The message names the key, its value and what is right."""
    with pytest.raises(ConfigError) as refusal:
        from_dict(ParallelConfig, values, "parallel")
    assert str(refusal.value).startswith(f"parallel.{message}") and "\n" not in str(refusal.value)


CHOICES = [
    # engine, layout, processes, of a node → how the engine describes itself
    ("auto", "bank", 2, 2, "fsdp 1 × 2, bank layout, fp32"),
    ("auto", "bank", 16, 8, "fsdp 2 × 8, bank layout, fp32"),
    ("auto", "row", 1, 1, "fsdp 1 × 1, row layout, fp32"),
    ("auto", "bank", 12, 8, "fsdp 1 × 12, bank layout, fp32"),
    ("ddp", "bank", 4, 4, "ddp, fp32"),
    ("single", "bank", 1, 1, "single, fp32"),
    ("deepspeed", "bank", 4, 4, "deepspeed ZeRO-2 × 4, fp32"),
]


@pytest.mark.parametrize("engine, layout, processes, per_node, description", CHOICES)
def test_the_engine_suits_the_processes(
    engine: Any, layout: Any, processes: int, per_node: int, description: str
) -> None:
    """auto: single for one process, fsdp for several, or where rows are wanted."""
    with fake_group(0, processes):
        built = build_engine(ParallelConfig(engine=engine, weight_layout=layout), "cpu", per_node)
        assert built.describe() == description


def test_alone_no_process_group_is_made() -> None:
    """auto on one process is plain Python: nothing is opened, nothing left."""
    engine = build_engine(ParallelConfig(), "cpu")
    assert engine.describe() == "single, fp32" and not dist.is_initialized()
    processes = engine.processes
    assert (processes.rank, processes.world_size, processes.host_group) == (0, 1, None)
    processes.close()


def test_one_process_gets_a_group_of_its_own_where_it_needs_one() -> None:
    """For fsdp and the row layout; without a launcher's addresses and ports. close() ends it."""
    engine = build_engine(ParallelConfig(weight_layout="row"), "cpu")
    try:
        assert dist.get_world_size() == 1
        assert engine.processes.on_rank0(lambda: "done") == "done"
    finally:
        engine.processes.close()
    assert not dist.is_initialized()


def test_single_is_refused_where_several_were_started() -> None:
    with fake_group(0, 2), pytest.raises(ConfigError) as refusal:
        build_engine(ParallelConfig(engine="single"), "cpu")
    assert str(refusal.value) == (
        "parallel.engine = 'single': 2 processes were started; use fsdp or ddp, or start one"
    )


def test_the_launchers_environment_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_WORLD_SIZE, or deepspeed's LOCAL_SIZE, is a node; without, all processes are on one."""
    with fake_group(3, 8):
        assert Processes("cpu").local_world_size == 8
        monkeypatch.setenv("LOCAL_SIZE", "2")
        assert Processes("cpu").local_world_size == 2
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert (Processes("cpu").rank, Processes("cpu").local_world_size) == (3, 4)
        assert build_engine(ParallelConfig(), "cpu").describe().startswith("fsdp 2 × 4")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """None at all, or too few for the processes of this node; auto then takes the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(processes, "gpu_is_there", lambda: "")
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="run.device = 'cuda': no GPU is visible here"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", local_rank=1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="this node has 2 GPUs, too few for its process 2"):
        choose_device("cuda", local_rank=2)


def test_a_gpu_that_torch_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of 16 GPUs would train on CPUs for days; run.device=cpu allows it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    with pytest.raises(
        ConfigError, match=r"run.device = 'auto': there is a GPU \(\S+.*cannot use;"
    ):
        choose_device("auto")
    assert choose_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert choose_device("auto").type == "cpu"


def test_a_host_without_the_others_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would make groups of another backend, and all would wait."""
    store = dist.HashStore()
    store.set("device of 0", "cuda")
    monkeypatch.setattr(Processes, "_store", lambda self: store)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    host = os.uname().nodename
    with pytest.raises(ConfigError, match=f"run.device = 'cpu': cpu on {host}, cuda on rank 0"):
        Processes("cpu")


def test_what_is_a_lack_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_precision_and_layout_reach_the_model() -> None:
    """bf16 is what groups compute in, never what parameters are; rows are parameters [C, C]."""
    small = LipNeXtConfig(depth=4, width=16, image_size=8)
    with fake_group(0, 2):
        config = ParallelConfig(weight_layout="row", precision="bf16", recompute_activations=True)
        model = build_engine(config, "cpu").place(small)
    assert {tuple(p.shape) for g in model.block_groups() for p in g.orthogonal_parameters()} == {
        (16, 16)
    }
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(group.recompute for group in model.block_groups())
    alone = build_engine(ParallelConfig(precision="bf16"), "cpu").place(small)
    assert {group.compute_dtype for group in alone.block_groups()} == {torch.bfloat16}


def test_without_a_recent_deepspeed_its_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line with the command that installs it. Only the version is asked for."""
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refusal:
        deepspeed.require_deepspeed()
    assert str(refusal.value) == (
        "parallel.engine = 'deepspeed': DeepSpeed is not installed here: "
        "pip install 'lipnext_scale[deepspeed]'"
    )
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: "found")
    monkeypatch.setattr(deepspeed, "version", lambda name: "0.16.4+cu12")
    with pytest.raises(ConfigError, match=r"DeepSpeed 0\.16\.4.* is older than 0\.19\.8"):
        deepspeed.require_deepspeed()
    monkeypatch.setattr(deepspeed, "version", lambda name: "0.20.0")
    deepspeed.require_deepspeed()
    asked = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"deepspeed>={".".join(map(str, deepspeed.OLDEST_DEEPSPEED))}"' in asked
