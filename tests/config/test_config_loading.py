"""Where a configuration's values come from: defaults < YAML (with its bases) < `a.b=c`."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lipnext_scale.config.recipe import Recipe, RunConfig, load_recipe
from lipnext_scale.data import AugmentConfig, DataConfig
from lipnext_scale.optim import OptimConfig
from lipnext_scale.utils.config import (
    ConfigError,
    as_float,
    dump,
    from_dict,
    load,
    to_dict,
)
from lipnext_scale.utils.errors import UserError

# Time says nothing here: the machine may be busy.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    count: int = 3
    flag: bool = False
    kind: Literal["one", "two"] = "one"
    pair: tuple[float, float] = (0.1, 0.2)


@dataclass(frozen=True)
class Outer:
    name: str = "unnamed"
    inner: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=Inner)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# --- precedence -------------------------------------------------------------------------------


def test_arguments_over_yaml_over_defaults(tmp_path):
    """Each source wins over the one before and leaves the rest alone; so does a later argument."""
    path = write(tmp_path / "a.yaml", "inner: {rate: 1.5, count: 7}\nname: file\n")
    loaded = load(Outer, path, ["inner.count=8", "inner.count=9", "other.flag=true"])
    assert loaded == Outer("file", Inner(rate=1.5, count=9), Inner(flag=True))


def test_an_argument_may_hold_equals_signs_and_yaml():
    """Only the first `=` divides; the value is YAML, so lists and quotes work."""
    loaded = load(Outer, None, ["name=a=b", "inner.pair=[0.3, 1/4]", "other.rate='1/8'"])
    assert loaded == Outer("a=b", Inner(pair=(0.3, 0.25)), Inner(rate=0.125))


def test_an_argument_for_a_whole_section_is_merged_into_it(tmp_path):
    """`inner={...}` changes the keys it names; the file's other keys are not dropped."""
    path = write(tmp_path / "a.yaml", "inner: {rate: 1.5, count: 7}\n")
    assert load(Outer, path, ["inner={count: 8}"]).inner == Inner(rate=1.5, count=8)


@pytest.mark.parametrize("text", ["inner:\n", "inner: {}\n", ""])
def test_an_empty_section_or_file_is_all_defaults(tmp_path, text):
    """An empty section means no changes, and arguments can still reach into it."""
    path = write(tmp_path / "a.yaml", text)
    assert load(Outer, path) == Outer()
    assert load(Outer, path, ["inner.count=4"]).inner.count == 4


@pytest.mark.parametrize("text", ["2024-13-45", "0x_", "[1", "@home", "{a", "runs/a: b: c"])
def test_an_argument_that_is_no_yaml_is_text(text):
    """What PyYAML cannot read, with whatever exception, is taken as it stands."""
    assert load(Outer, None, [f"name={text}"]).name == text


# --- base -------------------------------------------------------------------------------------


def test_base_is_merged_key_by_key(tmp_path):
    """A file holds only what differs from its base, down to single keys of a section."""
    write(tmp_path / "base.yaml", "name: base\ninner: {rate: 1.5, count: 7}\nother: {count: 1}\n")
    path = write(tmp_path / "a.yaml", "base: base.yaml\ninner: {count: 8}\nother:\n  # count: 8\n")
    assert load(Outer, path) == Outer("base", Inner(rate=1.5, count=8), Inner(count=1))


def test_base_chain_with_relative_paths(tmp_path, monkeypatch):
    """Every `base` is relative to the file that names it, not to where the command runs."""
    write(tmp_path / "shared/deep/first.yaml", "name: first\ninner: {count: 1, rate: 1}\n")
    write(tmp_path / "shared/second.yaml", "base: deep/first.yaml\ninner: {count: 2}\n")
    path = write(tmp_path / "runs/third.yaml", "base: ../shared/second.yaml\nother: {count: 3}\n")
    monkeypatch.chdir(tmp_path / "shared")
    assert load(Outer, path) == Outer("first", Inner(count=2, rate=1.0), Inner(count=3))
    assert load(Outer, Path("../runs/third.yaml")) == load(Outer, path)


def test_builtin_is_a_file_of_the_package(tmp_path, monkeypatch):
    """Anywhere, with its own bases, and as a base; an unknown name lists what there is."""
    monkeypatch.chdir(tmp_path)
    assert load_recipe("builtin:imagenet_1b.yaml").model.depth == 32  # of shared/paper.yaml
    path = write(tmp_path / "own.yaml", "base: builtin:digits.yaml\nmodel: {width: 64}\n")
    recipe = load_recipe(str(path))
    assert (recipe.model.width, recipe.model.depth) == (64, 6)
    with pytest.raises(UserError, match=r"builtin:x.yaml: no such file; there are .*digits.yaml,"):
        load_recipe("builtin:x.yaml")


@pytest.mark.parametrize("length", [1, 3])
def test_base_cycle_is_refused(tmp_path, length):
    """A file that inherits from itself, directly or over others, is named in the error."""
    for i in range(length):
        write(tmp_path / f"{i}.yaml", f"base: {(i + 1) % length}.yaml\n")
    with pytest.raises(UserError, match=r"0\.yaml: inherits from itself through `base`"):
        load(Outer, tmp_path / "0.yaml")


# --- no key is dropped ------------------------------------------------------------------------


@unhurried
@given(key=st.text(st.characters(codec="ascii"), min_size=1, max_size=8))
def test_every_unknown_key_is_refused(key):
    """Whatever is not a field is an error that names it, at the top and in a section."""
    if key not in {f.name for f in dataclasses.fields(Outer)}:
        with pytest.raises(ConfigError) as error:
            from_dict(Outer, {key: 1})
        assert error.value.key == key
    if key not in {f.name for f in dataclasses.fields(Inner)}:
        with pytest.raises(ConfigError) as error:
            from_dict(Outer, {"inner": {key: 1}})
        assert error.value.key == f"inner.{key}"


# --- values -----------------------------------------------------------------------------------


@unhurried
@given(above=st.integers(-999, 999), below=st.integers(1, 999))
def test_fractions_are_numbers(above, below):
    """36/255 is the float nearest to it, in a file, as an argument, and with spaces."""
    assert as_float(f"{above}/{below}") == above / below
    assert load(Outer, None, [f"inner.rate={above} / {below}"]).inner.rate == above / below


@pytest.mark.parametrize(
    "value",
    [True, None, "", "one", "1/0", "1/2/3", "nan", "inf", "-inf", "1e999", [1], {}, 10**400],
)
def test_what_is_no_finite_number(value):
    """None of these becomes a float."""
    assert as_float(value) is None


# --- round trips ------------------------------------------------------------------------------

positive = st.floats(1e-30, 1e30)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
recipes = st.builds(
    Recipe,
    # A run directory's name cannot hold a null byte.
    run=st.builds(
        RunConfig,
        dir=text.filter(lambda name: "\0" not in name),
        seed=st.integers(0, 2**63 - 1),
        device=st.sampled_from(["auto", "cpu", "cuda"]),
        profile_steps=st.sampled_from([(0, 0), (3, 9)]),
    ),
    data=st.builds(
        DataConfig,
        train=text,
        test=text,
        augment=st.builds(AugmentConfig, flip=st.booleans(), rand_augment=st.floats(0, 1)),
        memory_limit_gb=positive,
    ),
    optim=st.builds(
        OptimConfig,
        lr=positive,
        betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
        epochs=st.integers(21, 999),
    ),
)


@settings(unhurried, max_examples=60)
@given(recipes)
def test_dump_and_load(tmp_path_factory, recipe):
    """The YAML that a run directory keeps loads to the same recipe, floats to the last bit."""
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_bytes(dump(recipe).encode())
    assert load_recipe(str(path)) == recipe
    assert from_dict(Recipe, to_dict(recipe)) == recipe


def test_a_retired_setting_of_an_older_run_is_taken_with_its_only_value() -> None:
    """config.yaml of a run from before goes on; another value is refused as an unknown key."""
    needed = ["run.dir=a", "data.train=b", "data.test=c"]
    assert load_recipe(None, [*needed, "run.checkpoint_format=native"]) == load_recipe(None, needed)
    with pytest.raises(ConfigError, match=r"run\.checkpoint_format = 'deepspeed': unknown key"):
        load_recipe(None, [*needed, "run.checkpoint_format=deepspeed"])
