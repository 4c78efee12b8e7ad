"""What `accelerate launch` and a DeepSpeed file say about a run, as settings of ours.

accelerate tells its processes in environment variables what its configuration says. Our engines do
the work themselves, so each of these becomes the setting that means the same or is refused by name.

accelerate also exports what nobody was asked about: mixed_precision no, one accumulation step,
offload none, reshard true. These say nothing here, and the recipe decides. In a DeepSpeed file,
which is written by hand, everything counts but "auto".
"""

import json
from collections.abc import Mapping
from typing import Any

from lipnext_scale.config import ConfigError, LauncherSetting, as_float
from lipnext_scale.errors import UserError

Environment = Mapping[str, str]


class Said(dict[str, LauncherSetting]):
    """section.key → what was said; nobody contradicts himself."""

    def add(self, key: str, value: Any, name: str, text: Any) -> None:
        """`name = text` says that `key` has this value."""
        before = self.get(key)
        if before is not None and before.value != value:
            raise ConfigError(name, text, f"{before.source} says otherwise; make them agree")
        self[key] = LauncherSetting(value, f"{name} = {text}")


def launcher_settings(
    environment: Environment, deepspeed_file: str | None = None, processes: int | None = None
) -> Said:
    """All that the launcher says, or that a DeepSpeed file given as an argument does.

    processes: of the run, where that is looked at without them; else those that were started.
    """
    said = Said()
    processes = processes or int(environment.get("WORLD_SIZE", "1"))
    _require_all_started(environment)
    _read_common(environment, said)
    if _is_true(environment, "ACCELERATE_USE_FSDP"):
        _read_fsdp(environment, said)
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        _read_zero(environment, said)
        named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        if named:
            _read_file(named, processes, said)
    if deepspeed_file is not None:
        said.add("parallel.engine", "deepspeed", "--deepspeed_config", deepspeed_file)
        _read_file(deepspeed_file, processes, said)
    return said


# --- accelerate -------------------------------------------------------------------------------


def _require_all_started(environment: Environment) -> None:
    """Where accelerate was asked for several processes, they must be there.

    ACCELERATE_USE_CPU comes from its launcher of one process only, MASTER_ADDR if more were wanted.
    """
    if "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment:
        if "RANK" not in environment:
            raise UserError(
                "accelerate was asked for several processes and has started one: --cpu and "
                "distributed_type MULTI_CPU do so; use --multi_gpu --num_processes N, or "
                "distributed_type MULTI_GPU, FSDP or DEEPSPEED, which start them on CPUs too; "
                "if one was wanted, unset MASTER_ADDR, which says otherwise"
            )


def _read_common(environment: Environment, said: Said) -> None:
    """What accelerate says whatever the kind of distribution."""
    for name, instead in (
        ("ACCELERATE_USE_MEGATRON_LM", "use FSDP 2 or DeepSpeed"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "use parallel.shard_size for replicas of shards"),
    ):
        if _is_true(environment, name):
            raise ConfigError(name, environment[name], f"is not supported; {instead}")
    if _is_true(environment, "ACCELERATE_USE_CPU"):
        said.add("run.device", "cpu", "ACCELERATE_USE_CPU", environment["ACCELERATE_USE_CPU"])
    name = "ACCELERATE_MIXED_PRECISION"
    precision = environment.get(name, "no")
    if precision not in ("no", "bf16"):
        raise ConfigError(name, precision, "must be no (the recipe decides) or bf16")
    if precision == "bf16":
        said.add("parallel.precision", "bf16", name, precision)
    _read_dynamo(environment, said)


def _read_dynamo(environment: Environment, said: Said) -> None:
    name = "ACCELERATE_DYNAMO_BACKEND"
    backend = environment.get(name, "NO").upper()
    if backend == "NO":
        return
    if backend != "INDUCTOR":
        raise ConfigError(name, environment[name], "must be no or inductor")
    for option, usual in (
        ("MODE", "default"),
        ("USE_DYNAMIC", "False"),
        ("USE_FULLGRAPH", "False"),
    ):
        text = environment.get(f"ACCELERATE_DYNAMO_{option}", usual)
        if text != usual:
            raise ConfigError(f"ACCELERATE_DYNAMO_{option}", text, f"must be {usual}")
    said.add("parallel.compile", True, name, environment[name])


def _read_fsdp(environment: Environment, said: Said) -> None:
    """How modules are wrapped, replicas made equal and states saved is our engine's own business:

    FSDP_AUTO_WRAP_POLICY, _STATE_DICT_TYPE, _SYNC_MODULE_STATES and the like are not looked at.
    """
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise ConfigError("FSDP_VERSION", version, "must be 2 (fsdp_version: 2 in fsdp_config)")
    for name in ("FSDP_OFFLOAD_PARAMS", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
        if _is_true(environment, name):
            right = "must be false; DeepSpeed can offload the optimizer"
            raise ConfigError(name, environment[name], right)
    name = "ACCELERATE_USE_FSDP"
    said.add("parallel.engine", "fsdp", name, environment[name])
    name = "FSDP_RESHARD_AFTER_FORWARD"
    reshard = environment.get(name, "true")
    if reshard.lower() not in ("true", "false"):
        raise ConfigError(name, reshard, "must be true or false")
    if reshard.lower() == "false":
        said.add("parallel.reshard_after_forward", False, name, reshard)
    name = "FSDP_ACTIVATION_CHECKPOINTING"
    if _is_true(environment, name):
        said.add("parallel.recompute_activations", True, name, environment[name])


def _read_zero(environment: Environment, said: Said) -> None:
    """accelerate's own questions about DeepSpeed, asked where it is given no DeepSpeed file."""
    name = "ACCELERATE_USE_DEEPSPEED"
    said.add("parallel.engine", "deepspeed", name, environment[name])
    name = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
    if name in environment:
        said.add("parallel.zero_stage", _stage(name, environment[name]), name, environment[name])
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    steps = environment.get(name, "1")
    if steps not in ("1", "auto"):
        said.add("parallel.accumulation", _whole(name, steps), name, steps)
    name = "ACCELERATE_GRADIENT_CLIPPING"
    clipping = environment.get(name, "auto")
    if clipping not in ("auto", "none"):
        said.add("optim.clip_norm", _number(name, clipping), name, clipping)
    name = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"
    device = environment.get(name, "none")
    if _is_cpu(name, device):
        said.add("parallel.offload_optimizer", True, name, device)
    name = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"
    device = environment.get(name, "none")
    if device != "none":
        raise ConfigError(name, device, "must be none: the optimizer alone can be offloaded")


# --- a DeepSpeed file -------------------------------------------------------------------------

# Sizes of buckets, what is printed and the like: chosen by our engine, whatever the file says.
_OWN_CHOICE = {
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
}
_OWN_CHOICE_OF_ZERO = {
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
}
_OWN_CHOICE_OF_OFFLOAD = {"buffer_count", "fast_init", "pin_memory"}
_INSTEAD = {
    "optimizer": "the optimizers are the recipe's: optim",
    "scheduler": "the schedule is the recipe's: optim",
    "fp16": "use bf16",
    "offload_param": "the optimizer alone can be offloaded",
    "activation_checkpointing": "use parallel.recompute_activations",
    "communication_data_type": "use parallel.reduce_precision",
}


def _read_file(path: str, processes: int, said: Said) -> None:
    """What a DeepSpeed file says, where it is not "auto"; what has no meaning here is refused."""
    values = _read_json(path)
    clipping = f"{path}: gradient_clipping"
    if _speaks(values, "gradient_clipping"):
        text = values["gradient_clipping"]
        said.add("optim.clip_norm", _number(clipping, text), clipping, text)
    bf16 = _section(f"{path}: bf16", values.get("bf16"))
    if _speaks(bf16, "enabled"):
        enabled, name = bf16["enabled"], f"{path}: bf16.enabled"
        if not isinstance(enabled, bool):
            raise ConfigError(name, enabled, "must be true, false or auto")
        said.add("parallel.precision", "bf16" if enabled else "fp32", name, json.dumps(enabled))
    _read_batch(path, values, processes, said)
    _read_zero_section(f"{path}: zero_optimization", values.get("zero_optimization"), said)
    known = {"gradient_clipping", "bf16", "zero_optimization", *_BATCH}
    _refuse_others(f"{path}: ", values, known | _OWN_CHOICE)
    _refuse_others(f"{path}: bf16.", bf16, {"enabled"})


def _read_zero_section(name: str, section: Any, said: Said) -> None:
    zero = _section(name, section)
    stage = zero.get("stage", 0)  # as DeepSpeed has it where a file says nothing
    if stage != "auto":
        said.add("parallel.zero_stage", _stage(f"{name}.stage", stage), f"{name}.stage", stage)
    place = f"{name}.offload_optimizer"
    offload = _section(place, zero.get("offload_optimizer"))
    if _speaks(offload, "device"):
        device = offload["device"]
        is_cpu = _is_cpu(f"{place}.device", device)
        said.add("parallel.offload_optimizer", is_cpu, f"{place}.device", device)
    _refuse_others(f"{name}.", zero, {"stage", "offload_optimizer"} | _OWN_CHOICE_OF_ZERO)
    _refuse_others(f"{place}.", offload, {"device"} | _OWN_CHOICE_OF_OFFLOAD)


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _read_batch(path: str, values: dict[str, Any], world_size: int, said: Said) -> None:
    """DeepSpeed's batch = part × parts × processes, of which any two give the third."""
    whole, part, parts = (
        _whole(f"{path}: {key}", values[key]) if _speaks(values, key) else None for key in _BATCH
    )
    name, text = f"{path}: {_BATCH[0]}", str(whole)
    if part is not None:
        if whole is None and parts is None:
            right = f"needs {_BATCH[0]} or {_BATCH[2]} beside it, or be auto"
            raise ConfigError(f"{path}: {_BATCH[1]}", part, right)
        if parts is None:
            assert whole is not None
            parts = max(1, whole // (part * world_size))
        product = part * parts * world_size
        if whole not in (None, product):
            right = f"must be {_BATCH[1]} × {_BATCH[2]} × processes"
            raise ConfigError(name, whole, f"{right} = {part} × {parts} × {world_size}")
        whole, name = product, f"{path}: {_BATCH[1]} × {_BATCH[2]} × processes"
        text = f"{part} × {parts} × {world_size}"
    if whole is not None:
        said.add("data.batch_size", whole, name, text)
    if parts is not None:
        said.add("parallel.accumulation", parts, f"{path}: {_BATCH[2]}", parts)


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except FileNotFoundError:
        raise UserError(f"{path}: no such DeepSpeed file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object, holds a {type(values).__name__}")
    return values


def _section(name: str, section: Any) -> dict[str, Any]:
    if section in (None, "auto"):
        return {}
    if not isinstance(section, dict):
        raise ConfigError(name, section, "must be a JSON object")
    return section


def _refuse_others(where: str, values: dict[str, Any], known: set[str]) -> None:
    """Nothing is passed over in silence but what is off."""
    for key, value in values.items():
        if key not in known and not _is_off(value):
            instead = _INSTEAD.get(key, "leave it out")
            raise ConfigError(f"{where}{key}", value, f"is not supported; {instead}")


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return not value or any(_is_off(value.get(key, True)) for key in ("enabled", "device"))
    return value in (False, None, "none", "auto")


# --- values -----------------------------------------------------------------------------------


def _is_true(environment: Environment, name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1", "yes")


def _speaks(values: dict[str, Any], key: str) -> bool:
    return values.get(key) not in (None, "auto")


def _number(name: str, value: Any) -> float:
    number = as_float(value)
    if number is None:
        raise ConfigError(name, value, "must be a number")
    return number


def _whole(name: str, value: Any) -> int:
    number = as_float(value)
    if number is None or number < 1 or not number.is_integer():
        raise ConfigError(name, value, "must be a whole number from 1")
    return int(number)


def _stage(name: str, value: Any) -> int:
    if str(value) not in ("1", "2", "3"):
        right = "must be 1, 2 or 3; without ZeRO it is parallel.engine=ddp, without DeepSpeed"
        raise ConfigError(name, value, right)
    return int(value)


def _is_cpu(name: str, device: Any) -> bool:
    if device not in ("none", "cpu"):
        raise ConfigError(name, device, "must be none or cpu")
    return bool(device == "cpu")
