"""What accelerate's variables say becomes settings of ours, or is refused; layers of settings."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_environments import (
    ENGINE,
    FSDP2,
    MULTI_CPU,
    MULTI_GPU,
    NO_CONFIG,
    SINGLE_CPU,
    STAGE,
    TORCHRUN,
    ZERO2,
    ZERO3,
    ZERO_FLAGS,
    assert_told_or_refused,
    values,
)
from train_command import assert_refused, contents, prepare, run_train

from lipnext_scale.config import ConfigError, LauncherSetting
from lipnext_scale.errors import UserError
from lipnext_scale.launch_environment import launcher_settings
from lipnext_scale.recipe import load_recipe

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
NEEDED = ["run.dir=a", "data.train=b", "data.test=c"]


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, {}),
        (TORCHRUN, {}),
        (NO_CONFIG, {}),
        (SINGLE_CPU, {"run.device": "cpu"}),
        (MULTI_GPU, {}),
        ({**MULTI_GPU, "ACCELERATE_MIXED_PRECISION": "bf16"}, {"parallel.precision": "bf16"}),
        ({**MULTI_GPU, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {"parallel.compile": True}),
        (FSDP2, {ENGINE: "fsdp"}),
        (
            {**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"},
            {ENGINE: "fsdp", "parallel.reshard_after_forward": False},
        ),
        (
            {**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            {ENGINE: "fsdp", "parallel.recompute_activations": True},
        ),
        (ZERO_FLAGS, {ENGINE: "deepspeed", STAGE: 2}),
        ({**ZERO2, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, {ENGINE: "deepspeed", STAGE: 1}),
        (ZERO2, {ENGINE: "deepspeed", STAGE: 2}),
        (ZERO3, {ENGINE: "deepspeed", STAGE: 3}),
        (
            {
                **ZERO3,
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELERATE_GRADIENT_CLIPPING": "1.5",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                "ACCELERATE_MIXED_PRECISION": "bf16",
            },
            {
                ENGINE: "deepspeed",
                STAGE: 3,
                "parallel.accumulation": 4,
                "optim.clip_norm": 1.5,
                "parallel.offload_optimizer": True,
                "parallel.precision": "bf16",
            },
        ),
    ],
)
def test_accelerate_says(environment: dict[str, str], expected: dict[str, Any]) -> None:
    """What was asked of accelerate, and nothing of what it exports unasked."""
    assert values(environment) == expected


def test_every_setting_names_its_variable() -> None:
    """So that a contradiction can say who speaks."""
    assert launcher_settings(ZERO3) == {
        ENGINE: LauncherSetting("deepspeed", "ACCELERATE_USE_DEEPSPEED = true"),
        STAGE: LauncherSetting(3, "ACCELERATE_DEEPSPEED_ZERO_STAGE = 3"),
    }


@pytest.mark.parametrize(
    "environment, said",
    [
        (MULTI_CPU, "accelerate was asked for several processes and has started one"),
        ({**FSDP2, "FSDP_VERSION": "1"}, "FSDP_VERSION = '1': must be 2"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "FSDP_OFFLOAD_PARAMS = 'true': must be false"),
        (
            {**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD = 'true': must be false",
        ),
        (
            {**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"},
            "FSDP_RESHARD_AFTER_FORWARD = 'SHARD_GRAD_OP': must be true or false",
        ),
        ({**FSDP2, **ZERO2}, "ACCELERATE_USE_DEEPSPEED = 'true': ACCELERATE_USE_FSDP = true says"),
        ({**MULTI_GPU, "ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM"),
        (
            {**FSDP2, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
            "ACCELERATE_USE_PARALLELISM_CONFIG = 'true': is not supported; use parallel.shard_size",
        ),
        (
            {**MULTI_GPU, "ACCELERATE_MIXED_PRECISION": "fp16"},
            "ACCELERATE_MIXED_PRECISION = 'fp16'",
        ),
        ({**MULTI_GPU, "ACCELERATE_MIXED_PRECISION": "fp8"}, "ACCELERATE_MIXED_PRECISION = 'fp8'"),
        ({**MULTI_GPU, "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}, "must be no or inductor"),
        (
            {
                **MULTI_GPU,
                "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
                "ACCELERATE_DYNAMO_MODE": "max-autotune",
            },
            "ACCELERATE_DYNAMO_MODE = 'max-autotune': must be default",
        ),
        (
            {**ZERO2, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"},
            "ACCELERATE_DEEPSPEED_ZERO_STAGE = '0': must be 1, 2 or 3",
        ),
        (
            {**ZERO2, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"},
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE = 'nvme': must be none or cpu",
        ),
        (
            {**ZERO3, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"},
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE = 'cpu': must be none",
        ),
        (
            {**ZERO3, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "two"},
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS = 'two': must be a whole number",
        ),
    ],
)
def test_what_has_no_meaning_here_is_refused(environment: dict[str, str], said: str) -> None:
    """By the name of the variable, with what would be right."""
    with pytest.raises(UserError) as error:
        launcher_settings(environment)
    assert said in str(error.value) and "\n" not in str(error.value)


recorded = {**MULTI_CPU, **FSDP2, **ZERO2, "ACCELERATE_GRADIENT_CLIPPING": "1.0"}
texts = st.sampled_from(
    ["true", "false", "True", "no", "auto", "none", "", "2", "-1", "x", "1e999"]
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(recorded)), texts))
def test_any_environment_is_told_or_refused(environment: dict[str, str]) -> None:
    """Variables with odd texts, some of them absent."""
    environment.pop("WORLD_SIZE", None)  # the launcher's own number; processes.py reads it too
    assert_told_or_refused({**environment, "RANK": "0"}, None)


# --- as a layer -------------------------------------------------------------------------------


def test_the_launcher_is_over_the_defaults() -> None:
    """And leaves alone what it does not speak of."""
    told = launcher_settings({**FSDP2, "ACCELERATE_MIXED_PRECISION": "bf16"})
    recipe = load_recipe(None, [*NEEDED, "parallel.accumulation=2"], told)
    assert (recipe.parallel.engine, recipe.parallel.precision) == ("fsdp", "bf16")
    assert recipe.parallel.accumulation == 2
    assert load_recipe(None, NEEDED).parallel.engine == "auto"


@pytest.mark.parametrize("section", ["{}", "null", "{engine: auto}", "{engine: fsdp}"])
def test_a_file_that_leaves_it_open_or_agrees(tmp_path: Path, section: str) -> None:
    """An empty section, auto and the same value are no contradiction."""
    path = tmp_path / "a.yaml"
    path.write_text(f"parallel: {section}\n", encoding="utf-8")
    recipe = load_recipe(str(path), NEEDED, launcher_settings(FSDP2))
    assert recipe.parallel.engine == "fsdp"


ZERO1 = {**ZERO2, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}


@pytest.mark.parametrize(
    "environment", [FSDP2, ZERO1, ZERO2, ZERO3], ids=["fsdp2", "zero1", "zero2", "zero3"]
)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_fit_the_launchers_usual_words(
    path: Path, environment: dict[str, str]
) -> None:
    """What a recipe says of precision, clipping and resharding is no contradiction to them."""
    recipe = load_recipe(str(path), None, launcher_settings(environment))
    assert recipe.parallel.engine == launcher_settings(environment)["parallel.engine"].value
    assert recipe.optim == load_recipe(str(path)).optim


@pytest.mark.parametrize("text", ["3", "3.0", "30e-1", "6/2", "'3'"])
def test_one_number_in_any_spelling_agrees(text: str) -> None:
    """1e-3 and fractions are text to YAML, and still numbers."""
    told = {"optim.clip_norm": LauncherSetting(3.0, "ACCELERATE_GRADIENT_CLIPPING = 3.0")}
    assert load_recipe(None, [*NEEDED, f"optim.clip_norm={text}"], told).optim.clip_norm == 3


def test_a_wrong_value_of_the_launcher_names_its_variable() -> None:
    """Our own check finds it; the user has to know where it came from."""
    told = launcher_settings({**ZERO2, "ACCELERATE_GRADIENT_CLIPPING": "-1"})
    with pytest.raises(ConfigError) as error:
        load_recipe(None, [*NEEDED], {key: told[key] for key in ["optim.clip_norm"]})
    assert str(error.value) == (
        "optim.clip_norm = -1: must be positive "
        "(the launcher says so: ACCELERATE_GRADIENT_CLIPPING = -1)"
    )


# --- as a command -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["file", "argument"])
def test_a_contradiction_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """One line with our key and value, the variable and its text; nothing is written."""
    config = prepare(tmp_path)
    for name, text in FSDP2.items():
        monkeypatch.setenv(name, text)
    arguments = ["--config", str(config)]
    if by == "file":
        config.write_text(config.read_text() + "parallel: {engine: ddp}\n", encoding="utf-8")
    else:
        arguments.append("parallel.engine=ddp")
    before = contents(tmp_path)
    assert_refused(
        run_train(*arguments),
        "error: parallel.engine = 'ddp': the launcher says 'fsdp' (ACCELERATE_USE_FSDP = true); "
        "make them agree\n",
    )
    assert contents(tmp_path) == before


def test_print_config_shows_what_the_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--local_rank, which the deepspeed launcher adds, changes nothing."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = str(prepare(tmp_path))
    outcome = run_train("--local_rank=1", "--config", config, "--print-config")
    assert outcome.code == 0 and "  precision: bf16\n" in outcome.out
    assert run_train("--config", config, "--print-config") == outcome
