"""What accelerate's variables and a DeepSpeed file say becomes settings of ours, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_command import assert_refused, assert_refused_before_writing, prepare, run_train

from lipnext_scale.config.launchers import launcher_settings
from lipnext_scale.config.recipe import Recipe, RunConfig, load_recipe
from lipnext_scale.data import DataConfig
from lipnext_scale.utils.config import ConfigError, LauncherSetting, to_dict
from lipnext_scale.utils.errors import UserError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
NEEDED = ["run.dir=a", "data.train=b", "data.test=c"]

# Recorded from accelerate 1.15: what each of its launchers exports, but for ports and threads.
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
ALWAYS = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
}
SINGLE_CPU = {**ALWAYS, "ACCELERATE_USE_CPU": "True", "KMP_BLOCKTIME": "1"}
MULTI_CPU = {**SINGLE_CPU, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
MULTI_GPU = {**TORCHRUN, **ALWAYS}
FSDP2 = {
    **MULTI_GPU,
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_VERSION": "2",
}
ZERO3 = {
    **MULTI_GPU,
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "gradient_accumulation_steps,zero_stage,mixed_precision",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}
ENGINE, STAGE = "parallel.engine", "parallel.zero_stage"


def values(environment: dict[str, str], file: Path | None = None) -> dict[str, Any]:
    found = launcher_settings(environment, None if file is None else str(file))
    return {key: setting.value for key, setting in found.items()}


def write(tmp_path: Path, **content: Any) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **content}), encoding="utf-8")
    return path


# --- accelerate -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, expected",
    [
        (TORCHRUN, {}),
        (SINGLE_CPU, {"run.device": "cpu"}),
        ({**MULTI_GPU, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {"parallel.compile": True}),
        (FSDP2, {ENGINE: "fsdp"}),
        (
            {
                **FSDP2,
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "FSDP_RESHARD_AFTER_FORWARD": "false",
                "FSDP_ACTIVATION_CHECKPOINTING": "true",
            },
            {
                ENGINE: "fsdp",
                "parallel.precision": "bf16",
                "parallel.reshard_after_forward": False,
                "parallel.recompute_activations": True,
            },
        ),
        (ZERO3, {ENGINE: "deepspeed", STAGE: 3}),
        (
            {
                **ZERO3,
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELERATE_GRADIENT_CLIPPING": "1.5",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
            },
            {
                ENGINE: "deepspeed",
                STAGE: 3,
                "parallel.accumulation": 4,
                "optim.clip_norm": 1.5,
                "parallel.offload_optimizer": True,
            },
        ),
    ],
)
def test_accelerate_says(environment: dict[str, str], expected: dict[str, Any]) -> None:
    """What was asked of accelerate, and nothing of what it exports unasked."""
    assert values(environment) == expected


@pytest.mark.parametrize(
    "environment, said",
    [
        (MULTI_CPU, "accelerate was asked for several processes and has started one"),
        ({**FSDP2, "FSDP_VERSION": "1"}, "FSDP_VERSION = '1': must be 2"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "FSDP_OFFLOAD_PARAMS = 'true': must be false"),
        ({**FSDP2, **ZERO3}, "ACCELERATE_USE_DEEPSPEED = 'true': ACCELERATE_USE_FSDP = true says"),
        ({**MULTI_GPU, "ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM"),
        (
            {**MULTI_GPU, "ACCELERATE_MIXED_PRECISION": "fp16"},
            "ACCELERATE_MIXED_PRECISION = 'fp16': must be bf16 or no",
        ),
        (
            {**ZERO3, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"},
            "ACCELERATE_DEEPSPEED_ZERO_STAGE = '0': must be 1, 2, 3 or auto",
        ),
        (
            {**ZERO3, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "two"},
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS = 'two': must be a whole number",
        ),
    ],
)
def test_what_has_no_meaning_here_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as error:
        launcher_settings(environment)
    assert said in str(error.value) and "\n" not in str(error.value)


# --- a DeepSpeed file -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_the_shipped_files_choose_the_stage_alone(stage: int) -> None:
    """All else is auto: the recipe's; by accelerate or by --deepspeed_config."""
    path = ROOT / "launch" / "deepspeed" / f"zero{stage}.json"
    expected = {ENGINE: "deepspeed", STAGE: stage}
    by_accelerate = {**TORCHRUN, "ACCELERATE_USE_DEEPSPEED": "true"}
    by_accelerate["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
    assert values(by_accelerate) == expected
    assert values(TORCHRUN, path) == expected


def test_everything_in_a_file_counts(tmp_path: Path) -> None:
    """Other than in accelerate's variables, also what is usual."""
    path = write(
        tmp_path,
        gradient_clipping=3,
        gradient_accumulation_steps=1,
        bf16={"enabled": False},
        fp16={"enabled": "auto", "loss_scale": 0},
        zero_optimization={
            "stage": 3,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "offload_param": {"device": "none"},
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "round_robin_gradients": False,
        },
        steps_per_print=100,
    )
    assert values(TORCHRUN, path) == {
        ENGINE: "deepspeed",
        STAGE: 3,
        "optim.clip_norm": 3.0,
        "parallel.accumulation": 1,
        "parallel.precision": "fp32",
        "parallel.offload_optimizer": False,
    }
    environment = {**ZERO3, "ACCELERATE_MIXED_PRECISION": "bf16"}
    with pytest.raises(ConfigError, match="bf16.enabled = 'false': ACCELERATE_MIXED_PRECISION = b"):
        launcher_settings({**environment, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})


@pytest.mark.parametrize(
    "content, said",
    [
        ({"optimizer": {"type": "Adam"}}, "optimizer = {'type': 'Adam'}: is not supported; the op"),
        ({"fp16": {"enabled": True}}, "fp16 = {'enabled': True}: is not supported; use bf16"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled = 'yes': must be true, false or auto"),
        ({"zero_optimization": {}}, "zero_optimization.stage = 0: must be 1, 2, 3 or auto"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device = 'nvme': must be none, cpu or auto",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size = 8: is not supported; leave it out",
        ),
        ({"train_batch_size": 2.5}, "train_batch_size = 2.5: must be a whole number"),
        ({"train_micro_batch_size_per_gpu": 4}, "= 4: needs train_batch_size or gradient_acc"),
        (
            {
                "train_batch_size": 17,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            "train_batch_size = 17: must be train_micro_batch_size_per_gpu × "
            "gradient_accumulation_steps × processes = 4 × 2 × 2",
        ),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    """The message has the file, the key in it, its value and what would be right."""
    path = write(tmp_path, **content)
    with pytest.raises(ConfigError) as error:
        launcher_settings(TORCHRUN, str(path))
    assert str(path) in str(error.value) and said in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    with pytest.raises(UserError, match="ds.json: cannot be read: No such file"):
        launcher_settings({}, str(path))
    for text, said in (("{", "is not valid JSON"), ("[]", "must hold a JSON obj")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=f"ds.json: {said}"):
            launcher_settings({}, str(path))


numbers = st.integers(1, 64)
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@settings(deadline=None, max_examples=50)
@given(numbers, numbers, numbers, st.sampled_from([None, *BATCH]))
def test_two_batch_sizes_give_the_third(
    tmp_path_factory: pytest.TempPathFactory, part: int, parts: int, world: int, auto: str | None
) -> None:
    """DeepSpeed's batch is part × parts × processes, whichever of them is auto."""
    sizes: dict[str, Any] = dict(zip(BATCH, (part * parts * world, part, parts), strict=True))
    if auto is not None:
        sizes[auto] = "auto"
    path = write(tmp_path_factory.mktemp("ds"), **sizes)
    found = values({**TORCHRUN, "WORLD_SIZE": str(world)}, path)
    assert found["data.batch_size"] == part * parts * world
    assert found["parallel.accumulation"] == parts


recorded = {**MULTI_CPU, **FSDP2, **ZERO3, "ACCELERATE_GRADIENT_CLIPPING": "1.0"}
texts = st.sampled_from(["true", "True", "no", "auto", "none", "", "2", "-1", "x", "1e999"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.sampled_from(["auto", "cpu"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["enabled", "device", "stage", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)
KNOWN = ["zero_optimization", "bf16", "fp16", "gradient_clipping", "optimizer", *BATCH]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(recorded)), texts),
    st.none() | st.dictionaries(st.sampled_from(KNOWN), json_values),
)
def test_anything_is_understood_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    content: dict[str, Any] | None,
) -> None:
    """Settings that a recipe has, or the user's mistake in one line; never a bug's error."""
    path = None if content is None else write(tmp_path_factory.mktemp("ds"), **content)
    try:
        found = values({**environment, "RANK": "0", "WORLD_SIZE": "2"}, path)
    except UserError as error:
        assert "\n" not in str(error)
        return
    sections = to_dict(Recipe(RunConfig("a"), DataConfig("b", "c")))
    for key in found:
        section, name = key.split(".")
        assert name in sections[section], key


# --- as a layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["{}", "null", "{engine: auto}", "{engine: fsdp}"])
def test_a_file_that_leaves_it_open_or_agrees(tmp_path: Path, section: str) -> None:
    """An empty section, auto and the same value are no contradiction."""
    path = tmp_path / "a.yaml"
    path.write_text(f"parallel: {section}\n", encoding="utf-8")
    recipe = load_recipe(str(path), [*NEEDED, "parallel.accumulation=2"], launcher_settings(FSDP2))
    assert (recipe.parallel.engine, recipe.parallel.accumulation) == ("fsdp", 2)


def test_shipped_recipes_fit_the_launchers_defaults() -> None:
    """What a recipe says of precision, clipping and resharding is no contradiction to them."""
    for path in SHIPPED:
        for environment in (FSDP2, ZERO3):
            found = launcher_settings(environment)
            if environment is ZERO3 and load_recipe(str(path)).model.neck == "dense":
                continue  # DeepSpeed refuses it: test_layers_neck
            recipe = load_recipe(str(path), None, found)
            assert recipe.parallel.engine == found[ENGINE].value
            assert recipe.optim == load_recipe(str(path)).optim


def test_one_number_in_any_spelling_agrees() -> None:
    """1e-3 and fractions are text to YAML, and still numbers."""
    setting = {"optim.clip_norm": LauncherSetting(3.0, "ACCELERATE_GRADIENT_CLIPPING = 3.0")}
    for text in ("3", "30e-1", "6/2", "'3'"):
        recipe = load_recipe(None, [*NEEDED, f"optim.clip_norm={text}"], setting)
        assert recipe.optim.clip_norm == 3


def test_a_wrong_value_of_the_launcher_names_its_variable() -> None:
    """Our own check finds it; the user has to know where it came from."""
    environment = {**ZERO3, "ACCELERATE_GRADIENT_CLIPPING": "-1"}
    with pytest.raises(ConfigError) as error:
        load_recipe(None, NEEDED, launcher_settings(environment))
    assert str(error.value) == (
        "optim.clip_norm = -1: must be positive "
        "(set by the launcher: ACCELERATE_GRADIENT_CLIPPING = -1)"
    )


def test_the_command_refuses_contradictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with our key and value, the variable and its text; nothing is written."""
    config = prepare(tmp_path)
    path = write(tmp_path, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2)
    outcome = run_train("--config", str(config), "--deepspeed_config", str(path))
    said = ["data.batch_size = 4: the launcher says 6 (", "× processes = 3 × 2 × 1)"]
    assert_refused(outcome, *said)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    outcome = run_train("--local_rank=1", "--config", str(config), "--print-config")
    assert outcome.code == 0 and "  precision: bf16\n" in outcome.out
    for name, text in FSDP2.items():
        monkeypatch.setenv(name, text)
    right = "the launcher says 'fsdp' (ACCELERATE_USE_FSDP = true); make them agree\n"
    arguments = ["--config", str(config), "parallel.engine=ddp"]
    said = [f"error: parallel.engine = 'ddp': {right}"]
    assert_refused_before_writing(tmp_path, arguments, *said)
