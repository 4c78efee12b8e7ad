"""Export a run's slow weights: one safetensors file, or a directory of that and a config.json.

python -m lipnext_scale.export --run runs/digits --out digits.safetensors
python -m lipnext_scale.export --run runs/digits --out exports/digits
"""

import lipnext_scale.utils.passive  # noqa: F401

from pathlib import Path

from lipnext_scale.checkpoint.exports import SUFFIX, save_export
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.utils.errors import ArgumentParser, UserError, command


@command
def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(prog="lipnext_scale.export", description="Export a run's slow weights.")
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--out", type=Path, required=True, help="NAME.safetensors, or a directory")
    arguments = parser.parse_args(argv)
    is_file = arguments.out.suffix == SUFFIX
    other = arguments.out.suffix not in ("", SUFFIX) and not arguments.out.is_dir()
    if other or (arguments.out.is_dir() if is_file else arguments.out.is_file()):
        right = f"must be a file NAME{SUFFIX}, or a directory, without a suffix if it is new"
        raise UserError(f"--out {arguments.out}: {right}")
    run = RunDirectory(arguments.run)
    model = run.load_model()
    try:
        save_export(model, arguments.out, run.data_facts())
    except OSError as error:
        raise UserError(f"--out {arguments.out}: cannot be written: {error.strerror}") from None
    print(f"{arguments.out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
