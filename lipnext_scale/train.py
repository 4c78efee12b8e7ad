"""Train a model: parse, build, run.

    python -m lipnext_scale.train --config configs/digits.yaml [section.key=value ...]
    torchrun --nproc-per-node 8 -m lipnext_scale.train --config configs/imagenet_1b.yaml
    accelerate launch --num_processes 8 -m lipnext_scale.train --config configs/imagenet_1b.yaml

A run directory that holds a checkpoint is continued from it, exactly.
"""

from lipnext_scale import config as configuration
from lipnext_scale.cpu import keep_freed_memory
from lipnext_scale.errors import ArgumentParser, Stopped, command
from lipnext_scale.recipe import load_recipe
from lipnext_scale.trainer import Trainer


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.train", description="Train a LipNeXt.")
    parser.add_argument("--config", help="YAML file, such as configs/digits.yaml")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and stop"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="set over the file"
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.config is None and not arguments.overrides:
        parser.error("nothing to train: give --config, such as --config configs/digits.yaml")
    recipe = load_recipe(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(configuration.dump(recipe), end="")
        return
    keep_freed_memory()
    trainer = Trainer(recipe)
    try:
        trainer.run()
    except Stopped:  # on all ranks at the same step
        trainer.close()
        raise
    trainer.close()  # but not where one rank failed: it must not wait for the others


if __name__ == "__main__":
    main()
