"""The command of an installed package: `lipnext train …` is `python -m lipnext_scale.train …`."""

import os
import sys
from importlib import import_module

from lipnext_scale.utils.errors import UserError, command

COMMANDS = {
    "train": "train a model, or continue a run",
    "certify": "certify a model on a test set, and write a report",
    "attack": "look for images that a certificate is wrong about",
    "predict": "label image files, each with its certified radius",
    "compare": "compare runs: settings, certificates, curves",
    "study": "run a grid of settings and seeds, and make one table of it",
    "watch": "watch runs while they train",
    "export": "write a run's weights to a safetensors file",
    "doctor": "check this machine, or all nodes, before a run starts",
    "plan": "predict memory, times and cost of a run on many GPUs",
    "bench": "measure the loading of data, or a GPU",
}


@command
def main(argv: list[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: lipnext COMMAND …    lipnext COMMAND --help says more\n")
        print("\n".join(f"  {name:<9}{what}" for name, what in COMMANDS.items()))
        return
    if name not in COMMANDS:
        raise UserError(f"lipnext {name}: no such command; there are {', '.join(COMMANDS)}")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as utils/passive.py
    import_module(f"lipnext_scale.{name}").main(rest)
