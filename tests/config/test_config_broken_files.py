"""Broken files: exit code 2, one line that names the file or the key with its value, no traceback.

All of these are found before training and nothing may be written: no run directory comes into
being.
"""

from pathlib import Path

import pytest
from train_command import Cases, assert_case_refused, write, write_images

CASES = Cases()

# --- of the configuration -------------------------------------------------------------------


@CASES.add
def nothing_given(tmp: Path, config: str):
    return [], ["nothing to train", "--config"]


@CASES.add
def run_dir_missing(tmp: Path, config: str):
    return ["data.train=a", "data.test=b", "run.seed=1"], ["run.dir", "is required"]


@CASES.add
def train_data_missing(tmp: Path, config: str):
    return [f"run.dir={tmp}/run", "data.test=b"], ["data.train", "is required"]


@CASES.add
def file_missing(tmp: Path, config: str):
    return ["--config", f"{tmp}/smal.yaml"], [
        f"{tmp}/smal.yaml: no such",
        f"mean {tmp}/small.yaml?",
    ]


@CASES.add
def directory_missing(tmp: Path, config: str):
    return ["--config", f"{tmp}/no/small.yaml"], [f"{tmp}/no/small.yaml", f"no directory {tmp}/no"]


@CASES.add
def file_is_directory(tmp: Path, config: str):
    return ["--config", str(tmp)], [f"{tmp}: cannot be read"]


@CASES.add
def file_is_a_link_to_itself(tmp: Path, config: str):
    (tmp / "loop.yaml").symlink_to("loop.yaml")
    return ["--config", f"{tmp}/loop.yaml"], [f"{tmp}/loop.yaml: cannot be read"]


@CASES.add
def file_is_binary(tmp: Path, config: str):
    return ["--config", f"{tmp}/train-000.tar.gz"], [f"{tmp}/train-000.tar.gz: cannot be read"]


@CASES.add
def yaml_syntax_error(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "model:", "  width: 64", " depth: [1, 2")
    return ["--config", path], [f"{path}: is not valid YAML", "line 3"]


@CASES.add
def yaml_tab(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "model:", "\twidth: 64")
    return ["--config", path], [f"{path}: is not valid YAML", "line 2"]


@CASES.add
def yaml_impossible_date(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "run: {dir: 2024-13-45}")
    return ["--config", path], [f"{path}: is not valid YAML", "month"]


@CASES.add
def yaml_nested_without_end(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "[" * 1200)
    return ["--config", path], [f"{path}: is not valid YAML"]


@CASES.add
def yaml_runs_code(tmp: Path, config: str):
    made = tmp / "made"
    path = write(tmp / "broken.yaml", f"run: !!python/object/apply:os.mkdir ['{made}']")
    return ["--config", path], [f"{path}: is not valid YAML", "python/object/apply"]


@CASES.add
def yaml_key_twice(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "model: {width: 8}", "model: {depth: 1}")
    return ["--config", path], [f"{path}: is not valid YAML", "the key model is given twice"]


@CASES.add
def yaml_is_list(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "- model", "- data")
    return ["--config", path], [f"{path}: must hold a mapping", "list"]


@CASES.add
def yaml_is_text(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "hello")
    return ["--config", path], [f"{path}: must hold a mapping", "str"]


@CASES.add
def base_missing(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "base: smal.yaml")
    return ["--config", path], [f"{tmp}/smal.yaml: no such", f"did you mean {tmp}/small.yaml?"]


@CASES.add
def base_is_no_text(tmp: Path, config: str):
    path = write(tmp / "broken.yaml", "base: [small.yaml]")
    return ["--config", path], ["base = ['small.yaml']", "path of another YAML file"]


@CASES.add
def base_cycle(tmp: Path, config: str):
    write(tmp / "one.yaml", "base: two.yaml")
    path = write(tmp / "two.yaml", "base: one.yaml")
    return ["--config", path], [f"{path}: inherits from itself"]


# --- of the data ----------------------------------------------------------------------------


@CASES.add
def shard_missing(tmp: Path, config: str):
    arguments = [f"data.train={tmp}/train-{{000..002}}.tar.gz"]
    return ["--config", config, *arguments], [
        "data.train = ",
        f"{tmp}/train-002.tar.gz",
        "a tar of images",
    ]


@CASES.add
def pattern_matches_nothing(tmp: Path, config: str):
    return ["--config", config, "data.test=none-*.tar"], ["data.test = 'none-*.tar'", "no shard"]


@CASES.add
def pattern_unbalanced(tmp: Path, config: str):
    return ["--config", config, "data.test='{a'"], ["data.test = '{a'", "Unbalanced"]


@CASES.add
def builtin_unknown(tmp: Path, config: str):
    return (
        ["--config", config, "data.train=builtin:digts/train-*.tar.gz"],
        ["data.train = 'builtin:digts/train-*.tar.gz'", "no shard"],
    )


@CASES.add
def shard_is_directory(tmp: Path, config: str):
    return ["--config", config, f"data.test={tmp}"], ["data.test = ", f"no shard '{tmp}'"]


@CASES.add
def shard_name_too_long(tmp: Path, config: str):
    return ["--config", config, f"data.test={'x' * 300}"], ["data.test = 'xxx", "no shard"]


@CASES.add
def shard_is_no_tar(tmp: Path, config: str):
    path = write(tmp / "shard.tar", "This is not a tar. " * 100)
    return ["--config", config, f"data.train={path}"], [f"{path}: is not a readable shard"]


@CASES.add
def shard_is_empty(tmp: Path, config: str):
    path = write(tmp / "shard.tar")
    return ["--config", config, f"data.train={path}"], [f"{path}: is not a readable shard"]


@CASES.add
def shard_is_cut_off(tmp: Path, config: str):
    whole = (tmp / "train-000.tar.gz").read_bytes()
    path = tmp / "shard.tar.gz"
    path.write_bytes(whole[: len(whole) // 2])
    return ["--config", config, f"data.train={path}"], [f"{path}: is not a readable shard"]


@CASES.add
def shard_without_samples(tmp: Path, config: str):
    write_images(tmp / "none.tar.gz", 0)
    pattern = "*none*.tar.gz"
    return ["--config", config, f"data.train='{pattern}'"], [
        f"data.train = '{pattern}'",
        "no samples",
    ]


@CASES.add
def images_of_another_size(tmp: Path, config: str):
    arguments = ["model.image_size=16"]
    return ["--config", config, *arguments], ["model.image_size = 16", "data.train are 1×8×8"]


@CASES.add
def evaluation_images_of_another_size(tmp: Path, config: str):
    write_images(tmp / "big.tar.gz", 3, (16, 16))
    arguments = [f"data.test={tmp}/big.tar.gz"]
    return ["--config", config, *arguments], ["model.image_size = 8", "data.test are 1×16×16"]


@CASES.add
def images_that_are_not_square(tmp: Path, config: str):
    write_images(tmp / "wide.tar.gz", 6, (8, 12))
    arguments = [f"data.train={tmp}/wide.tar.gz"]
    return ["--config", config, *arguments], ["model.image_size = 8", "data.train are 1×8×12"]


@CASES.add
def images_of_other_channels(tmp: Path, config: str):
    arguments = ["model.in_channels=3", "model.width=12"]
    return ["--config", config, *arguments], ["model.in_channels = 3", "data.train are 1×8×8"]


@CASES.add
def images_of_two_sizes(tmp: Path, config: str):
    write_images(tmp / "train-001.tar.gz", 6, (4, 4))
    return ["--config", config], ["model.image_size = 8", "data.train are 1×4×4"]


@CASES.add
def labels_above_num_classes(tmp: Path, config: str):
    return ["--config", config, "model.num_classes=2"], ["model.num_classes = 2", "from 0 to 2"]


@CASES.add
def label_below_zero(tmp: Path, config: str):
    write_images(tmp / "test-001.tar.gz", 3, classes=-2)
    return ["--config", config], ["model.num_classes = 3", "data.test has labels from -1 to"]


@CASES.add
def batch_above_the_samples(tmp: Path, config: str):
    return ["--config", config, "data.batch_size=13"], ["data.train = ", "12 samples", "13"]


@CASES.add
def memory_limit_exceeded(tmp: Path, config: str):
    arguments = ["data.memory_limit_gb=1e-7"]
    return ["--config", config, *arguments], ["data.train = ", "data.memory_limit_gb = 1e-07"]


@pytest.mark.parametrize("name", CASES)
def test_broken_file(tmp_path, monkeypatch, name):
    """A file that cannot be used is refused by name, with nothing written."""
    assert_case_refused(CASES[name], tmp_path, monkeypatch)
