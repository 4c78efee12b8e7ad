"""Broken values: exit code 2, one line that names the key and the value, no traceback.

They are found while the configuration is read, before any other file is looked at; nothing may be
written, so the tree of files must be the same afterwards to the last byte: no run directory.
"""

import re

import pytest
from train_command import assert_refused, contents, prepare, run_train, write

# (arguments over a configuration that works, what the message must hold)
VALUES: dict[str, tuple[list[str], list[str]]] = {
    # keys
    "misspelt key": (["model.widht=64"], ["model.widht = 64", "did you mean model.width?"]),
    "misspelt key of run": (["run.devise=cpu"], ["run.devise = 'cpu'", "did you mean run.device?"]),
    "misspelt section": (["modle.width=64"], ["modle = {'width': 64}", "did you mean model?"]),
    "key of another section": (["optim.width=64"], ["optim.width = 64", "unknown key", "epochs"]),
    "key without its section": (["width=64"], ["width = 64", "unknown key"]),
    "key like nothing": (["loss.zzz=1"], ["loss.zzz = 1", "loss has name, epsilon"]),
    "section as a value": (["model=64"], ["model = 64", "must be a mapping"]),
    "section as a list": (["model=[1, 2]"], ["model = [1, 2]", "must be a mapping"]),
    "override into a value": (
        ["model.width.more=3"],
        ["model.width.more = 3", "model.width = 8 is a value, not a section"],
    ),
    "override without equals": (["model.width"], ["'model.width'", "section.key=value"]),
    "override without key": (["=64"], ["'=64'", "section.key=value"]),
    "override with empty part": (["model..width=64"], ["'model..width=64'", "section.key=value"]),
    # types
    "text for int": (["model.depth=deep"], ["model.depth = 'deep'", "whole number"]),
    "fraction for int": (["model.width=64/2"], ["model.width = '64/2'", "whole number"]),
    "float for int": (["optim.epochs=1.5"], ["optim.epochs = 1.5", "whole number"]),
    "bool for int": (["run.seed=true"], ["run.seed = True", "whole number"]),
    "null for int": (["run.seed="], ["run.seed = None", "whole number"]),
    "list for int": (["data.batch_size=[4]"], ["data.batch_size = [4]", "whole number"]),
    "inf for int": (["model.depth=.inf"], ["model.depth = inf", "whole number"]),
    "nan for int": (["run.max_steps=.nan"], ["run.max_steps = nan", "whole number"]),
    "text for float": (["optim.lr=fast"], ["optim.lr = 'fast'", "must be a number"]),
    "bool for float": (["loss.epsilon=yes"], ["loss.epsilon = True", "must be a number"]),
    "mapping for float": (["optim.lr={a: 1}"], ["optim.lr = {'a': 1}", "must be a number"]),
    "nan for float": (["loss.epsilon=.nan"], ["loss.epsilon = nan", "must be a number"]),
    "inf for float": (["optim.lr=.inf"], ["optim.lr = inf", "must be a number"]),
    "nan as text": (["model.beta=nan"], ["model.beta = 'nan'", "must be a number"]),
    "overflow": (["loss.logit_scale=1e999"], ["loss.logit_scale = '1e999'", "must be a number"]),
    "division by zero": (["loss.epsilon=36/0"], ["loss.epsilon = '36/0'", "must be a number"]),
    "text for bool": (
        ["data.augment.flip=maybe"],
        ["data.augment.flip = 'maybe'", "true or false"],
    ),
    "int for bool": (["model.positional_embedding=1"], ["positional_embedding = 1", "true or"]),
    "int for text": (["run.dir=7"], ["run.dir = 7", "must be text"]),
    "null for text": (["data.train="], ["data.train = None", "must be text"]),
    "list for text": (["data.test=[a]"], ["data.test = ['a']", "must be text"]),
    "one of two": (["optim.betas=0.9"], ["optim.betas = 0.9", "list of 2"]),
    "three of two": (["optim.betas=[0, 0, 0]"], ["optim.betas = [0, 0, 0]", "list of 2"]),
    "text in a list": (["optim.betas=[0.9, x]"], ["optim.betas = 'x'", "must be a number"]),
    # choices
    "unknown padding": (["model.padding=reflect"], ["model.padding = 'reflect'", "circular, zero"]),
    "misspelt choice": (["loss.name=emna"], ["loss.name = 'emna'", "did you mean emma?"]),
    "off is a bool": (["model.activation=off"], ["model.activation = False", "beta_abs, minmax"]),
    "unknown rule": (["optim.exp_rule=exact"], ["optim.exp_rule = 'exact'", "paper, bounded"]),
    "unknown engine": (["parallel.engine=magic"], ["parallel.engine = 'magic'", "single"]),
    "unknown device": (["run.device=tpu"], ["run.device = 'tpu'", "auto, cpu, cuda"]),
    "list for a choice": (["model.parametrisation=[product]"], ["parametrisation = ['product']"]),
    # ranges
    "width below the stem": (
        ["model.patch_size=4"],
        ["model.width = 8", "in_channels·patch_size² = 16"],
    ),
    "patch does not divide": (["model.patch_size=3"], ["model.patch_size = 3", "image_size = 8"]),
    "no depth": (["model.depth=0"], ["model.depth = 0", "at least 1"]),
    "negative patch": (["model.patch_size=-2"], ["model.patch_size = -2", "at least 1"]),
    "one class": (["model.num_classes=1"], ["model.num_classes = 1", "at least 2"]),
    "beta above 1": (["model.beta=1.5"], ["model.beta = 1.5", "[0, 1]"]),
    "beta below 0": (["model.beta=-1/4"], ["model.beta = -0.25", "[0, 1]"]),
    "shift above a quarter": (["model.shift_ratio=1/3"], ["shift_ratio = 0.333333", "[0, 1/4]"]),
    "minmax with odd width": (
        ["model.activation=minmax", "model.width=9"],
        ["model.width = 9", "even for activation minmax"],
    ),
    "bank above depth": (["model.blocks_per_bank=2"], ["blocks_per_bank = 2", "depth = 1"]),
    "no batch": (["data.batch_size=0"], ["data.batch_size = 0", "at least 1"]),
    "negative crop": (
        ["data.augment.crop_padding=-1"],
        ["data.augment.crop_padding = -1", "at least 0"],
    ),
    "crop beyond the image": (
        ["data.augment.crop_padding=8"],
        ["augment.crop_padding = 8", "image_size = 8"],
    ),
    "no memory": (["data.memory_limit_gb=0"], ["data.memory_limit_gb = 0", "positive"]),
    "empty data": (["data.train=' '"], ["data.train = ' '", "must name"]),
    "empty run.dir": (["run.dir=''"], ["run.dir = ''", "must name a directory"]),
    "negative seed": (["run.seed=-1"], ["run.seed = -1", "at least 0"]),
    "no checkpoints": (["run.keep_checkpoints=0"], ["run.keep_checkpoints = 0", "at least 1"]),
    "no log": (["run.log_every=0"], ["run.log_every = 0", "at least 1"]),
    "negative lr": (["optim.lr=-1e-3"], ["optim.lr = -0.001", "positive"]),
    "zero clip": (["optim.clip_norm=0"], ["optim.clip_norm = 0", "positive"]),
    "beta of Adam": (["optim.betas=[0.9, 1]"], ["optim.betas = (0.9, 1.0)", "[0, 1)"]),
    "no epochs": (["optim.epochs=0"], ["optim.epochs = 0", "at least 1"]),
    "warm-up to the end": (["optim.warmup_epochs=2"], ["warmup_epochs = 2", "epochs = 2"]),
    "negative lookahead": (["optim.lookahead=-1"], ["optim.lookahead = -1", "0 (off)"]),
    "lr that grows": (["optim.final_lr_ratio=2"], ["optim.final_lr_ratio = 2", "[0, 1]"]),
    "negative radius": (["loss.epsilon=-0.5"], ["loss.epsilon = -0.5", "at least 0"]),
    "radii crossed": (["loss.radius_min=4"], ["loss.radius_min = 4", "radius_max = 3"]),
    "no logits": (["loss.logit_scale=0"], ["loss.logit_scale = 0", "positive"]),
}


def is_plain(argument: str) -> bool:
    return re.fullmatch(r"\w+\.\w+=.*", argument) is not None


@pytest.mark.parametrize("name", VALUES)
def test_broken_value(tmp_path, name):
    """A value that cannot be is refused before anything is read or written."""
    arguments, said = VALUES[name]
    config = prepare(tmp_path)
    before = contents(tmp_path)
    assert_refused(run_train("--config", str(config), *arguments), *said)
    assert contents(tmp_path) == before


def test_the_table_starts_from_what_works(tmp_path):
    """Without the mistakes the same configuration trains, or the tables would prove nothing."""
    config = prepare(tmp_path)
    outcome = run_train("--config", str(config))
    assert (outcome.code, outcome.err) == (0, "")
    assert (tmp_path / "run/checkpoints/step-000000006").is_dir()


PLAIN = [name for name, (arguments, _) in VALUES.items() if all(map(is_plain, arguments))]


@pytest.mark.parametrize("name", PLAIN)
def test_broken_value_in_the_file(tmp_path, name):
    """Written in a YAML file over the working one, it gives the very same message."""
    arguments, _ = VALUES[name]
    sections: dict[str, list[str]] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        section, _, key = key.partition(".")
        sections.setdefault(section, []).append(f"{key}: {value}")
    lines = [f"{section}: {{{', '.join(values)}}}" for section, values in sections.items()]
    config = prepare(tmp_path)
    broken = write(tmp_path / "broken.yaml", "base: small.yaml", *lines)
    from_arguments = run_train("--config", str(config), *arguments)
    assert_refused(from_arguments)
    assert run_train("--config", str(broken)) == from_arguments
