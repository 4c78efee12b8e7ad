"""The settings that `accelerate launch` and a DeepSpeed file give to a run.

accelerate passes its configuration to its processes in environment variables. Our engines do the
work themselves, so each variable becomes the setting that means the same or is refused by name.

accelerate also exports defaults that the user never chose: these set nothing. A DeepSpeed file is
written by hand: everything in it counts but "auto".
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lipnext_scale.utils.config import ConfigError, LauncherSetting, as_float
from lipnext_scale.utils.errors import UserError


class Settings(dict[str, LauncherSetting]):
    """section.key → its value and source."""

    def add(self, key: str, value: Any, name: str, text: Any) -> None:
        """`name = text` gives `key` this value."""
        before = self.get(key)
        if before is not None and before.value != value:
            raise ConfigError(name, text, f"{before.source} says otherwise; make them agree")
        self[key] = LauncherSetting(value, f"{name} = {text}")


class Rule(NamedTuple):
    """The setting that a variable or a key of a file means, and the value of each of its texts."""

    key: str
    means: Mapping[str, Any] | Callable[[str, Any], Any]
    silent: tuple[str, ...] = ("auto",)  # texts that set nothing

    def apply(self, name: str, value: Any, settings: Settings) -> None:
        text = json.dumps(value) if isinstance(value, bool) else str(value)
        if text.lower() in self.silent:
            return
        if callable(self.means):
            meaning = self.means(name, value)
        elif text.lower() in self.means:
            meaning = self.means[text.lower()]
        else:
            *others, last = [*self.means, *self.silent]
            right = f"must be {', '.join(others)} or {last}" if others else f"must be {last}"
            raise ConfigError(name, value, right + _hint(name))
        settings.add(self.key, meaning, name, text)


def _number(name: str, value: Any) -> float:
    number = as_float(value)
    if number is None:
        raise ConfigError(name, value, "must be a number")
    return number


def _whole(name: str, value: Any) -> int:
    number = as_float(value) or 0.0
    if number < 1 or not number.is_integer():
        raise ConfigError(name, value, "must be a whole number from 1")
    return int(number)


def _only(text: str) -> Rule:
    """What cannot be changed here."""
    return Rule("", {}, (text,))


RESHARD, RECOMPUTE = "parallel.reshard_after_forward", "parallel.recompute_activations"
OFFLOAD = "parallel.offload_optimizer"
STAGE = Rule("parallel.zero_stage", {"1": 1, "2": 2, "3": 3})
COMMON = {
    "ACCELERATE_USE_CPU": Rule("run.device", {"true": "cpu"}, ("false",)),
    "ACCELERATE_MIXED_PRECISION": Rule("parallel.precision", {"bf16": "bf16"}, ("no",)),
    "ACCELERATE_DYNAMO_BACKEND": Rule("parallel.compile", {"inductor": True}, ("no",)),
    "ACCELERATE_DYNAMO_MODE": _only("default"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": _only("false"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": _only("false"),
    "ACCELERATE_USE_MEGATRON_LM": _only("false"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": _only("false"),
}
# How modules are wrapped and states saved is our engine's own choice: FSDP_AUTO_WRAP_POLICY,
# _STATE_DICT_TYPE, _SYNC_MODULE_STATES and the like are not read.
FSDP = {
    "ACCELERATE_USE_FSDP": Rule("parallel.engine", {"true": "fsdp"}),
    "FSDP_VERSION": _only("2"),
    "FSDP_OFFLOAD_PARAMS": _only("false"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": _only("false"),
    "FSDP_RESHARD_AFTER_FORWARD": Rule(RESHARD, {"false": False}, ("true",)),
    "FSDP_ACTIVATION_CHECKPOINTING": Rule(RECOMPUTE, {"true": True}, ("false",)),
}
ZERO = {
    "ACCELERATE_USE_DEEPSPEED": Rule("parallel.engine", {"true": "deepspeed"}),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": STAGE,
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Rule("parallel.accumulation", _whole, ("1", "auto")),
    "ACCELERATE_GRADIENT_CLIPPING": Rule("optim.clip_norm", _number, ("none", "auto")),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": Rule(OFFLOAD, {"cpu": True}, ("none",)),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": _only("none"),
}
FILE = {
    "gradient_clipping": Rule("optim.clip_norm", _number),
    "bf16.enabled": Rule("parallel.precision", {"true": "bf16", "false": "fp32"}),
    "zero_optimization.stage": STAGE,
    "zero_optimization.offload_optimizer.device": Rule(OFFLOAD, {"none": False, "cpu": True}),
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Sizes of buckets, what is printed and the like: our engine chooses, whatever the file says.
OWN_CHOICE = re.compile(
    r"steps_per_print|wall_clock_breakdown|memory_breakdown|dump_state|zero_(allow|force)_\w+|"
    r"stage3_\w+|\w+_bucket_size|sub_group_size|overlap_comm|contiguous_gradients|reduce_scatter|"
    r"allgather_partitions|ignore_unused_parameters|buffer_count|fast_init|pin_memory"
)
HINTS = {
    "ACCELERATE_USE_MEGATRON_LM": "use FSDP 2 or DeepSpeed",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "use parallel.shard_size for replicas of shards",
    "FSDP_VERSION": "set fsdp_version: 2 in fsdp_config",
    "FSDP_OFFLOAD_PARAMS": "DeepSpeed can offload the optimizer",
    "stage": "without ZeRO use parallel.engine=ddp, without DeepSpeed",
    "optimizer": "the optimizers are the recipe's: optim",
    "scheduler": "the schedule is the recipe's: optim",
    "fp16": "use bf16",
    "offload_param": "the optimizer alone can be offloaded",
    "activation_checkpointing": "use parallel.recompute_activations",
    "communication_data_type": "use parallel.reduce_precision",
}


def launcher_settings(
    environment: Mapping[str, str], deepspeed_file: str | None = None, processes: int | None = None
) -> Settings:
    """All settings of the launcher, or of a DeepSpeed file given as an argument.

    processes: of the run, if it is checked without them; else those that were started.
    """
    settings = Settings()
    processes = processes or int(environment.get("WORLD_SIZE", "1"))
    _require_all_started(environment)
    fsdp, zero = (
        environment.get(f"ACCELERATE_USE_{name}", "").lower() == "true"
        for name in ("FSDP", "DEEPSPEED")
    )
    rules = {**COMMON, **(FSDP if fsdp else {}), **(ZERO if zero else {})}
    variables = {"FSDP_VERSION": "1", **environment}
    for name, rule in rules.items():
        if name in variables:
            rule.apply(name, variables[name], settings)
    if zero and (named := environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")):
        _read_file(named, processes, settings)
    if deepspeed_file is not None:
        settings.add("parallel.engine", "deepspeed", "--deepspeed_config", deepspeed_file)
        _read_file(deepspeed_file, processes, settings)
    return settings


def _require_all_started(environment: Mapping[str, str]) -> None:
    """accelerate's launcher of one process alone sets ACCELERATE_USE_CPU, and MASTER_ADDR if the
    user asked for more."""
    if {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= environment.keys() and "RANK" not in environment:
        raise UserError(
            "accelerate was asked for several processes and has started one: --cpu and "
            "distributed_type MULTI_CPU do so; use --multi_gpu --num_processes N, or "
            "distributed_type MULTI_GPU, FSDP or DEEPSPEED, which start them on CPUs too; "
            "if one was wanted, unset MASTER_ADDR"
        )


# --------------------------------------------------------------------------------------------------
# A DeepSpeed file.


def _read_file(path: str, processes: int, settings: Settings) -> None:
    """Every key is one of `FILE`, our engine's own choice, off, or refused."""
    leaves = dict(_leaves(_read_json(path)))
    leaves.setdefault("zero_optimization.stage", 0)  # DeepSpeed's own default
    for key, value in leaves.items():
        name, last = f"{path}: {key}", key.rpartition(".")[2]
        if value in (None, "auto") or key in BATCH or OWN_CHOICE.fullmatch(last):
            continue
        if key in FILE:
            FILE[key].apply(name, value, settings)
        elif not _is_off(value):
            hint = _hint(key) or "; leave it out"
            raise ConfigError(name, value, f"is not supported{hint}")
    _read_batch(path, leaves, processes, settings)


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; sections that are not read are values as they stand."""
    for key, value in values.items():
        if isinstance(value, dict) and key in ("bf16", "zero_optimization", "offload_optimizer"):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def _read_batch(path: str, values: dict[str, Any], processes: int, settings: Settings) -> None:
    """DeepSpeed's batch = part × parts × processes, of which any two give the third."""
    whole, part, parts = (
        None if values.get(key) in (None, "auto") else _whole(f"{path}: {key}", values[key])
        for key in BATCH
    )
    name, text = f"{path}: {BATCH[0]}", str(whole)
    if part is not None:
        if parts is None and whole is None:
            right = f"needs {BATCH[0]} or {BATCH[2]} beside it, or be auto"
            raise ConfigError(f"{path}: {BATCH[1]}", part, right)
        parts = parts or max(1, (whole or 0) // (part * processes))
        product, text = part * parts * processes, f"{part} × {parts} × {processes}"
        formula = f"{BATCH[1]} × {BATCH[2]} × processes"
        if whole not in (None, product):
            raise ConfigError(name, whole, f"must be {formula} = {text}")
        whole, name = product, f"{path}: {formula}"
    if whole is not None:
        settings.add("data.batch_size", whole, name, text)
    if parts is not None:
        settings.add("parallel.accumulation", parts, f"{path}: {BATCH[2]}", parts)


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object, holds a {type(values).__name__}")
    return values


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return not value or any(_is_off(value.get(key, True)) for key in ("enabled", "device"))
    return value in (False, None, "none", "auto")


def _hint(name: str) -> str:
    hint = HINTS.get(re.split(r"[.: ]", name)[-1], "")
    return f"; {hint}" if hint else ""
