"""What a DeepSpeed file says becomes settings of ours, or is refused by its key."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_environments import (
    ENGINE,
    STAGE,
    TORCHRUN,
    ZERO_FILE,
    assert_told_or_refused,
    values,
    write,
)
from train_command import assert_refused, prepare, run_train

from lipnext_scale.config import ConfigError
from lipnext_scale.errors import UserError
from lipnext_scale.launch_environment import launcher_settings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_shipped_files_choose_the_stage_alone(stage: int) -> None:
    """All else is auto: the recipe's; by accelerate or by --deepspeed_config."""
    path = ROOT / "launch" / "deepspeed" / f"zero{stage}.json"
    expected = {ENGINE: "deepspeed", STAGE: stage}
    assert values({**ZERO_FILE, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}) == expected
    assert values(TORCHRUN, path) == expected


def test_a_file_speaks_of_all_it_holds(tmp_path: Path) -> None:
    """Other than with accelerate's variables, what it says is meant, also where it is usual."""
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


@pytest.mark.parametrize(
    "content, said",
    [
        (
            {"optimizer": {"type": "Adam"}},
            "optimizer = {'type': 'Adam'}: is not supported; the opt",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "the schedule is the recipe's"),
        (
            {"fp16": {"enabled": True}},
            "ds.json: fp16 = {'enabled': True}: is not supported; use bf",
        ),
        (
            {"bf16": {"enabled": "yes"}},
            "ds.json: bf16.enabled = 'yes': must be true, false or auto",
        ),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage = 0: must be 1, 2 or 3"),
        ({"zero_optimization": {}}, "zero_optimization.stage = 0: must be 1, 2 or 3"),
        ({"zero_optimization": 2}, "ds.json: zero_optimization = 2: must be a JSON object"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param = {'device': 'cpu'}: is not supported",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device = 'nvme': must be none or cpu",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"super_offload": True}}},
            "zero_optimization.offload_optimizer.super_offload = True: is not supported",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_hpz_partition_size = 8: is not supported",
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
    path = write(tmp_path, **{"zero_optimization": {"stage": 2}, **content})
    with pytest.raises(ConfigError) as error:
        launcher_settings(TORCHRUN, str(path))
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("text, said", [("{", "is not valid JSON"), ("[]", "must hold a JSON obj")])
def test_a_file_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    """Absent, broken or no mapping: named."""
    path = tmp_path / "ds.json"
    with pytest.raises(UserError, match="ds.json: no such DeepSpeed file"):
        launcher_settings({}, str(path))
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=f"ds.json: {said}"):
        launcher_settings({}, str(path))


def test_accelerate_and_its_file_agree(tmp_path: Path) -> None:
    """bf16 here and not there is nobody's wish."""
    path = write(tmp_path, zero_optimization={"stage": 2}, bf16={"enabled": False})
    environment = {**ZERO_FILE, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    assert values(environment)["parallel.precision"] == "fp32"
    with pytest.raises(ConfigError, match="bf16.enabled = 'false': ACCELERATE_MIXED_PRECISION = b"):
        launcher_settings({**environment, "ACCELERATE_MIXED_PRECISION": "bf16"})


numbers = st.integers(1, 64)
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@settings(deadline=None)
@given(numbers, numbers, numbers, st.sampled_from([None, *BATCH]))
def test_two_batch_sizes_give_the_third(
    tmp_path_factory: pytest.TempPathFactory, part: int, parts: int, world: int, auto: str | None
) -> None:
    """DeepSpeed's batch is part × parts × processes, whichever of them is left to us."""
    given_ = dict(zip(BATCH, (part * parts * world, part, parts), strict=True))
    if auto is not None:
        given_[auto] = "auto"  # type: ignore[assignment]
    path = write(tmp_path_factory.mktemp("ds"), zero_optimization={"stage": 1}, **given_)
    found = values({**TORCHRUN, "WORLD_SIZE": str(world)}, path)
    assert found["data.batch_size"] == part * parts * world
    assert found["parallel.accumulation"] == parts


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
@given(st.dictionaries(st.sampled_from(KNOWN), json_values))
def test_any_file_is_told_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    """JSON of any shape under the keys that are looked at."""
    assert_told_or_refused(TORCHRUN, write(tmp_path_factory.mktemp("ds"), **content))


def test_a_batch_size_that_contradicts_ours(tmp_path: Path) -> None:
    """A DeepSpeed file's batch is checked against the recipe's, with all three numbers."""
    path = write(
        tmp_path,
        zero_optimization={"stage": 2},
        train_micro_batch_size_per_gpu=3,
        gradient_accumulation_steps=2,
    )
    outcome = run_train("--config", str(prepare(tmp_path)), "--deepspeed_config", str(path))
    assert_refused(
        outcome, "data.batch_size = 4: the launcher says 6 (", "× processes = 3 × 2 × 1)"
    )
