"""The user's mistakes: one line, exit code 2. Anything unexpected is a bug and has a traceback."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

Arguments = ParamSpec("Arguments")
# Seconds. A busy machine takes two to end a process that has torch and a process group loaded.
PATIENCE = 5


class UserError(Exception):
    """Something the user can fix: the message names the key or file, its value, what is right."""


class RunFailed(Exception):
    """The run itself went wrong (a non-finite loss, say): one line, exit code 1."""


class Stopped(Exception):
    """The run stopped because a signal asked for it: one line, exit code 128 + signal.

    With SIGUSR1 it is 0: torchrun takes any other for a failure and starts the run again.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 0 if self.number == signal.SIGUSR1 else 128 + self.number


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors. prog: `lipnext_scale.train`, or `lipnext train`."""

    def __init__(self, prog: str, **options: Any) -> None:
        if os.path.basename(sys.argv[0]) == "lipnext":
            prog = prog.replace("lipnext_scale.", "lipnext ")
        super().__init__(prog=prog, **options)

    def error(self, message: str) -> NoReturn:
        unknown, right = message.removeprefix("unrecognized arguments: "), ""
        if unknown != message and unknown.endswith((".tar", ".tar.gz")):
            right = "quote a pattern that the shell expands: 'DIR/test-*.tar'; "
        elif unknown != message and unknown[0] != "-" and "--run" in self._option_string_actions:
            right = f"say --run {unknown.split()[0]}; "
        raise UserError(f"{message}; {right}see {self.prog} --help")

    def add_configuration(self, required: bool = False) -> None:
        """--config and the arguments that go over it."""
        what = "YAML file, such as configs/digits.yaml; builtin:digits.yaml is the package's own"
        self.add_argument("--config", required=required, help=what)
        self.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="set over the file"
        )

    def add_runs(self, out: str) -> None:
        """Run directories, and --out, where to write what compares them."""
        self.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
        self.add_argument(
            "--out", type=directory, metavar="DIR", default=out, help=f"where to write ({out})"
        )


def directory(text: str) -> Path:
    """The type of an option that names one, which need not exist."""
    if (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{path}: is a file; must be a directory")
    return path


def positive(text: str) -> int:
    """The type of an option that counts."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from 1")
    return int(text)


def command(main: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate a command's `main(argv)`: errors become one line on stderr and an exit code."""

    @wraps(main)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see utils/passive.py
                signal.signal(signal.SIGINT, signal.default_int_handler)
            main(*args, **kwargs)
        except UserError as error:
            _end_with(f"error: {error}", 2)
        except RunFailed as error:
            _end_with(f"failed: {error}", 1)
        except Stopped as stopped:
            _end_with(str(stopped), stopped.exit_code, same_on_all_ranks=True)
        except BrokenPipeError:  # the reader of our output has gone: write nothing more
            sys.stdout = open(os.devnull, "w")
            sys.exit(1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return wrapped


def _end_with(message: str, code: int, same_on_all_ranks: bool = False) -> NoReturn:
    """Print why, and exit.

    All ranks usually meet the same error: rank 0 prints it, and the launcher then ends the others.
    A rank that is still alive after PATIENCE met an error of its own, and prints that.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0 and not same_on_all_ranks:
        time.sleep(PATIENCE)
        message = f"rank {rank}: {message}"
    if rank == 0 or not same_on_all_ranks:
        print(message, file=sys.stderr, flush=True)
    sys.exit(code)
