"""Engines: how a model is placed on processes, differentiated and clipped."""

from lipnext_scale.parallel.config import ParallelConfig
from lipnext_scale.parallel.engine import DDPEngine, Engine, SingleEngine
from lipnext_scale.parallel.fsdp import FSDPEngine
from lipnext_scale.parallel.pieces import training_pieces
from lipnext_scale.parallel.processes import Processes, is_out_of_memory, lost_a_peer
from lipnext_scale.parallel.zero import DeepSpeedEngine

__all__ = [
    "DDPEngine",
    "DeepSpeedEngine",
    "Engine",
    "FSDPEngine",
    "ParallelConfig",
    "Processes",
    "SingleEngine",
    "build_engine",
    "is_out_of_memory",
    "lost_a_peer",
    "training_pieces",
]

ENGINES = {engine.name: engine for engine in (SingleEngine, DDPEngine, FSDPEngine)}


def build_engine(
    config: ParallelConfig,
    device_name: str,
    local_world_size: int | None = None,
    batch_size: int | None = None,
    timeout: float | None = None,
) -> Engine:
    """The engine that the configuration names, on the processes that were started.

    batch_size: of the whole batch; DeepSpeed is told it, and does nothing with it.
    timeout: seconds that a collective may take; None: torch's own choice.
    """
    alone = config.engine == "single" or (
        config.engine == "auto" and config.weight_layout == "bank"
    )
    processes = Processes(device_name, alone, local_world_size, timeout)
    name = config.engine
    if name == "auto":
        name = "single" if alone and processes.world_size == 1 else "fsdp"
    if name == "deepspeed":
        return DeepSpeedEngine(config, processes, batch_size)
    return ENGINES[name](config, processes)
