"""How a model is spread over processes: engines behind one interface."""

from lipnext_scale.distributed.config import ParallelConfig
from lipnext_scale.distributed.deepspeed import DeepSpeedEngine
from lipnext_scale.distributed.engine import DDPEngine, Engine
from lipnext_scale.distributed.fsdp import FSDPEngine
from lipnext_scale.distributed.processes import Processes, is_out_of_memory, lost_a_peer
from lipnext_scale.utils.config import ConfigError

__all__ = [
    "DDPEngine",
    "DeepSpeedEngine",
    "Engine",
    "FSDPEngine",
    "ParallelConfig",
    "Processes",
    "build_engine",
    "is_out_of_memory",
    "lost_a_peer",
]

ENGINES = {engine.name: engine for engine in (Engine, DDPEngine, FSDPEngine, DeepSpeedEngine)}


def build_engine(
    config: ParallelConfig,
    device_name: str,
    local_world_size: int | None = None,
    timeout: float | None = None,
) -> Engine:
    """The configured engine on the processes that were started; arguments as of `Processes`."""
    alone = config.engine == "single" or (
        config.engine == "auto" and config.weight_layout == "bank"
    )
    processes = Processes(device_name, alone, local_world_size, timeout)
    name = config.engine
    if name == "auto":
        name = "single" if alone and processes.world_size == 1 else "fsdp"
    if name == "single" and processes.world_size > 1:
        right = f"{processes.world_size} processes were started; use fsdp or ddp, or start one"
        raise ConfigError("parallel.engine", name, right)
    return ENGINES[name](config, processes)
