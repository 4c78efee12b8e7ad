"""Train a model: parse, build, run.

    python -m lipnext_scale.train --config configs/digits.yaml [section.key=value ...]
    torchrun --nproc-per-node 8 -m lipnext_scale.train --config configs/imagenet_1b.yaml

or by accelerate launch and deepspeed (docs/engines.md), whose settings are taken over and must
agree with the rest. A run directory that holds a checkpoint is continued from it, exactly.
"""

import lipnext_scale.utils.passive  # noqa: F401

import argparse
import os
from contextlib import suppress
from functools import partial
from signal import SIGUSR1

from lipnext_scale.checks import look
from lipnext_scale.checks.run import memory
from lipnext_scale.config.launchers import launcher_settings
from lipnext_scale.config.recipe import load_recipe
from lipnext_scale.observe.metrics import require_wandb
from lipnext_scale.training.preflight import check_run
from lipnext_scale.training.signals import stop_requests
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils import config as configuration
from lipnext_scale.utils.cpu import keep_freed_memory
from lipnext_scale.utils.errors import ArgumentParser, Stopped, command, positive


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    launcher = launcher_settings(os.environ, arguments.deepspeed_config, arguments.ranks)
    recipe = load_recipe(arguments.config, arguments.overrides, launcher)
    if arguments.print_config:
        print(configuration.dump(recipe), end="")
        return
    if recipe.run.wandb:
        require_wandb(recipe.run.wandb)
    if arguments.check:
        ranks = arguments.ranks or 1
        per_node = arguments.ranks_per_node or ranks
        check_run(recipe, ranks, per_node)
        for finding in look("memory of the run", partial(memory, recipe, ranks, per_node)):
            print(finding.line())  # a prediction: it stops no run
        print(f"run.dir: {os.path.abspath(recipe.run.dir)}\nok")
        return
    keep_freed_memory()
    # Slurm's warning may come while the shards are checked: the run then stops after one step.
    with stop_requests(signals=(SIGUSR1,)) as request:
        trainer = Trainer(recipe, request)
        try:
            trainer.run()
        except Stopped:  # on all ranks at the same step
            with suppress(RuntimeError):  # all is saved: this is no failure of the run
                trainer.processes.close()
            raise
        trainer.processes.close()  # but not where one rank failed: it must not wait for the others


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="lipnext_scale.train", description="Train a LipNeXt.")
    parser.add_configuration()
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and stop"
    )
    parser.add_argument(
        "--check", action="store_true", help="check settings, devices and data, and stop"
    )
    for option, meaning in (("--ranks", "in all"), ("--ranks-per-node", "of a node")):
        parser.add_argument(
            option, type=positive, metavar="N", help=f"--check: processes {meaning}"
        )
    parser.add_argument(
        "--deepspeed_config", metavar="FILE", help="JSON file, such as launch/deepspeed/zero2.json"
    )
    # Customary beside the file, and needless.
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    # The deepspeed launcher adds this one; the environment has the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args(argv)
    if arguments.config is None and not arguments.overrides:
        parser.error("nothing to train: give --config, such as --config builtin:digits.yaml")
    return arguments


if __name__ == "__main__":
    main()
