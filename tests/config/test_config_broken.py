"""Broken values, files and runs: exit code 2, one line that names it, and nothing is written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_command import (
    assert_refused,
    assert_refused_before_writing,
    contents,
    prepare,
    run_train,
    write,
    write_images,
)

ROOT = Path(__file__).parents[2]

# --- values ---------------------------------------------------------------------------------------

# An argument over a configuration that works → what the message must hold.
VALUES = {
    "model.widht=64": ["model.widht = 64", "did you mean model.width?"],
    "modle.width=64": ["modle = {'width': 64}", "did you mean model?"],
    "optim.width=64": ["optim.width = 64", "unknown key", "epochs"],
    "loss.zzz=1": ["loss.zzz = 1", "loss has name, epsilon"],
    "model=64": ["model = 64", "must be a mapping"],
    "model.width.more=3": ["model.width.more = 3", "model.width = 8 is a value, not a section"],
    "model.width": ["'model.width'", "section.key=value"],
    "model..width=64": ["'model..width=64'", "section.key=value"],
    # types
    "model.depth=deep": ["model.depth = 'deep'", "whole number"],
    "optim.epochs=1.5": ["optim.epochs = 1.5", "whole number"],
    "run.seed=true": ["run.seed = True", "whole number"],
    "optim.lr=fast": ["optim.lr = 'fast'", "must be a number"],
    "data.augment.flip=maybe": ["data.augment.flip = 'maybe'", "true or false"],
    "run.dir=7": ["run.dir = 7", "must be text"],
    "optim.betas=0.9": ["optim.betas = 0.9", "list of 2"],
    "optim.betas=[0.9, x]": ["optim.betas = 'x'", "must be a number"],
    # choices
    "model.padding=reflect": ["model.padding = 'reflect'", "circular, zero"],
    "loss.name=emna": ["loss.name = 'emna'", "did you mean emma?"],
    "model.activation=off": ["model.activation = False", "beta_abs, minmax"],
    # ranges: one of each section, and those of the section `run`
    "model.patch_size=4": ["model.width = 8", "in_channels·patch_size² = 16"],
    "model.beta=-1/4": ["model.beta = -0.25", "[0, 1]"],
    "data.batch_size=0": ["data.batch_size = 0", "at least 1"],
    "data.augment.crop_padding=8": ["augment.crop_padding = 8", "image_size = 8"],
    "optim.warmup_epochs=2": ["warmup_epochs = 2", "epochs = 2"],
    "loss.radius_min=4": ["loss.radius_min = 4", "radius_max = 3"],
    "loss.epsilon=36": ["loss.epsilon = 36", "must be", "such as 36/255"],
    "loss.epsilon=8.1": ["loss.epsilon = 8.1", "8 at most; such as 36/255"],
    "configs/x.yaml": ["'configs/x.yaml'", "did you mean --config configs/x.yaml?"],
    "run.dir=''": ["run.dir = ''", "must name a directory"],
    "run.seed=-1": ["run.seed = -1", "at least 0"],
    "run.log_every=0": ["run.log_every = 0", "at least 1"],
    "run.profile_steps=[3, 200]": ["run.profile_steps = [3, 200]", "at most 100 steps"],
    "run.profile_steps=[29, 30]": ["run.profile_steps = [29, 30]: must begin by step 6"],
    "run.profile_ranks=[]": ["run.profile_ranks = []", "list of ranks"],
}


def test_broken_values(tmp_path):
    """Refused before anything is read or written; without the mistake the same run trains."""
    config = str(prepare(tmp_path))
    for argument, said in VALUES.items():
        assert_refused_before_writing(tmp_path, ["--config", config, argument], *said)
    outcome = run_train("--config", config)
    assert (outcome.code, outcome.err) == (0, "")
    assert (tmp_path / "run/checkpoints/step-000000006").is_dir()


# --- files ----------------------------------------------------------------------------------------

# Lines of a configuration file → what the message must hold beside its name.
YAML = [
    (["model:", "  width: 64", " depth: [1, 2"], "is not valid YAML", "line 3"),
    (["run: {dir: 2024-13-45}"], "is not valid YAML", "month"),
    (["[" * 1200], "is not valid YAML", ""),
    (["run: !!python/object/apply:os.mkdir [made]"], "is not valid YAML", "python/object/apply"),
    (["model: {width: 8}", "model: {depth: 1}"], "is not valid YAML", "model is given twice"),
    (["- model", "- data"], "must hold a mapping", "list"),
]


def test_configuration_files_that_are_none(tmp_path):
    prepare(tmp_path)
    for lines, *said in YAML:
        path = write(tmp_path / "broken.yaml", *lines)
        assert_refused_before_writing(tmp_path, ["--config", path], f"{path}: ", *said)
    loop = tmp_path / "loop.yaml"
    loop.symlink_to("loop.yaml")
    for path in (tmp_path, loop):
        assert_refused(run_train("--config", str(path)), f"{path}: cannot be read")
    assert_refused(run_train("--config", f"{tmp_path}/train-000.tar.gz"), "is not a YAML file")
    said = [f"{tmp_path}/smal.yaml: no such", f"mean {tmp_path}/small.yaml?"]
    assert_refused(run_train("--config", f"{tmp_path}/smal.yaml"), *said)
    base = write(tmp_path / "broken.yaml", "base: smal.yaml")
    assert_refused(run_train("--config", base), *said)
    base = write(tmp_path / "broken.yaml", "base: [small.yaml]")
    assert_refused(run_train("--config", base), "base = ['small.yaml']", "path of another YAML")
    assert_refused(run_train(), "nothing to train", "--config")
    assert_refused(run_train("data.train=a", "data.test=b"), "run.dir", "is required")


def test_data_that_cannot_be_used(tmp_path, monkeypatch):
    """Missing, damaged, or not what the model takes."""
    monkeypatch.chdir(tmp_path)
    config = str(prepare(tmp_path))
    write_images(tmp_path / "none.tar.gz", 0)
    write_images(tmp_path / "big.tar.gz", 3, (16, 16))
    write_images(tmp_path / "wide.tar.gz", 6, (8, 12))
    write_images(tmp_path / "labels.tar.gz", 3, classes=-2)
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    write(tmp_path / "shard.tar", "This is not a tar. " * 100)
    whole = (tmp_path / "train-000.tar.gz").read_bytes()
    (tmp_path / "half.tar.gz").write_bytes(whole[: len(whole) // 2])
    for argument, *said in (
        ("data.train=train-{000..002}.tar.gz", "data.train = ", "train-002.tar.gz"),
        ("data.test=none-*.tar", "data.test = 'none-*.tar'", "no shard"),
        ("data.test='{a'", "data.test = '{a'", "Unbalanced"),
        ("data.train=builtin:digts/train-*.tar.gz", "data.train = 'builtin:digts", "no shard"),
        (f"data.test={tmp_path}", f"a directory of shards: say '{tmp_path}/big.tar.gz' or "),
        (f"data.test={tmp_path / 'photos'}", "python -m data_prep.folders"),
        (f"data.test={'x' * 300}", "data.test = 'xxx", "no shard"),
        ("data.train=shard.tar", "shard.tar: is not a readable shard"),
        ("data.train=half.tar.gz", "half.tar.gz: is not a readable shard"),
        ("data.train='*none*.tar.gz'", "data.train = '*none*.tar.gz'", "no samples"),
        ("data.test=big.tar.gz", "model.image_size = 8", "data.test are 1×16×16"),
        (
            "data={train: wide.tar.gz, test: big.tar.gz}",
            "the images of data.train are 1×8×12, the images of data.test are 1×16×16",
            "data.augment.resize=[8,10] data.augment.crop_padding=0 data.test_resize=9",
        ),
        ("model={in_channels: 3, width: 12}", "model.in_channels = 3", "data.train are 1×8×8"),
        ("model.num_classes=2", "model.num_classes = 2", "from 0 to 2"),
        ("data.test=labels.tar.gz", "model.num_classes = 3", "data.test has labels from -1 to"),
        ("data.batch_size=13", "data.train = ", "12 samples", "13"),
        ("data.memory_limit_gb=1e-7", "data.train = ", "data.memory_limit_gb = 1e-07"),
    ):
        assert_refused_before_writing(tmp_path, ["--config", config, argument], *said)


# --- runs -----------------------------------------------------------------------------------------


def test_runs_that_cannot_start_or_go_on(tmp_path, monkeypatch):
    """Directories, another run, a checkpoint that is damaged: all is left as it was."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)  # cannot be imported
    config = str(prepare(tmp_path))
    for argument, *said in (
        ("run.device=cuda", "run.device = 'cuda'", "no GPU"),
        (f"run.dir={config}", f"run.dir = '{config}'", "cannot be written"),
        (f"run.dir={config}/a/run", f"run.dir = '{config}/a/run'", "cannot be written"),
        (f"run.dir={tmp_path}/{'x' * 300}", "run.dir = ", "cannot be written"),
        ("model.width=100000000", "model.width = 100000000"),
        ("run.wandb=project", "run.wandb = 'project'", "pip install 'lipnext_scale[wandb]'"),
    ):
        assert_refused_before_writing(tmp_path, ["--config", config, argument], *said)
    assert run_train("--config", config).code == 0
    other = [f"run.dir = '{tmp_path}/run'", "model.width = 8 there, 16 here"]
    assert_refused_before_writing(tmp_path, ["--config", config, "model.width=16"], *other)
    (shard,) = (tmp_path / "run/checkpoints/step-000000006").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), bytes(content[:1000])):
        shard.write_bytes(damaged)
        assert_refused_before_writing(tmp_path, ["--config", config], str(shard))
    path = write(tmp_path / "run/config.yaml", "- 1")
    assert_refused(run_train("--config", config), f"{path}: must hold a mapping")


@pytest.mark.parametrize("command", ["lipnext_scale.train", "data_prep.edm"])
def test_ctrl_c_while_importing(tmp_path, command):
    """Here it comes with the import of numpy: no traceback, the end of a process by that signal."""
    write(tmp_path / "numpy.py", "import os, signal", "os.kill(os.getpid(), signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-m", command, "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["model.widht=64"], "error: model.widht = 64: unknown key; did you mean model.width?"),
        (["run.dir=small.yaml/run"], "error: run.dir = 'small.yaml/run': cannot be written: "),
    ],
    ids=["checked first", "checked last"],
)
def test_as_a_command(tmp_path, arguments, said):
    """In a process of its own stderr holds that line alone: no warning of any library either."""
    config = prepare(tmp_path)
    before = contents(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "lipnext_scale.train", "--config", str(config), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert contents(tmp_path) == before
