"""What accelerate tells its processes, recorded, and what we make of it."""

import json
from pathlib import Path
from typing import Any

from lipnext_scale.config import to_dict
from lipnext_scale.data import DataConfig
from lipnext_scale.errors import UserError
from lipnext_scale.launch_environment import launcher_settings
from lipnext_scale.recipe import Recipe, RunConfig

# Recorded from accelerate 1.15: what each of its launchers exports, but for ports and threads.
DYNAMO = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}
TORCHRUN = {
    "GROUP_RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "2",
}
NO_CONFIG = {**DYNAMO, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False"}
SINGLE_CPU = {**NO_CONFIG, "ACCELERATE_USE_CPU": "True", "KMP_BLOCKTIME": "1"}
MULTI_CPU = {**SINGLE_CPU, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
MULTI_GPU = {**TORCHRUN, **DYNAMO, "ACCELERATE_MIXED_PRECISION": "no"}
FSDP2 = {
    **MULTI_GPU,
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_VERSION": "2",
}
ZERO_FLAGS = {
    **TORCHRUN,
    "ACCELERATE_CONFIG_DS_FIELDS": "",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_DEEPSPEED": "true",
}
ZERO2 = {
    **ZERO_FLAGS,
    "ACCELERATE_CONFIG_DS_FIELDS": "gradient_accumulation_steps,zero_stage,mixed_precision",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}
ZERO3 = {**ZERO2, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}
ZERO_FILE = {
    **TORCHRUN,
    "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_DEEPSPEED": "true",
}
ENGINE, STAGE = "parallel.engine", "parallel.zero_stage"


def values(environment: dict[str, str], file: Path | None = None) -> dict[str, Any]:
    told = launcher_settings(environment, None if file is None else str(file))
    return {key: said.value for key, said in told.items()}


def write(tmp_path: Path, **content: Any) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def assert_told_or_refused(environment: dict[str, str], path: Path | None) -> None:
    """Either settings that a recipe has, or the user's mistake in one line; never a bug's error."""
    try:
        found = values(environment, path)
    except UserError as error:
        assert "\n" not in str(error)
        return
    sections = to_dict(Recipe(RunConfig("a"), DataConfig("b", "c")))
    for key in found:
        section, name = key.split(".")
        assert name in sections[section], key
