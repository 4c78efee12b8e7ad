"""The user's mistakes, told in one line with exit code 2; all else is a bug and has a traceback."""

import argparse
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

Arguments = ParamSpec("Arguments")
# Seconds. A busy machine takes two to end a process that has torch and a process group loaded.
PATIENCE = 5


class UserError(Exception):
    """Something the user can mend: the message names the key or file, its value, what is right."""


class RunFailed(Exception):
    """The run itself went wrong (a non-finite loss, say): told in one line with exit code 1."""


class Stopped(Exception):
    """A signal asked for an end and the run came to one: told in a line, exit code 128 + signal.

    With SIGUSR1 it is 0: torchrun would take any other for a failure, and start the run again.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 0 if self.number == signal.SIGUSR1 else 128 + self.number


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose complaints are UserErrors, as all mistakes of the user."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; {self.prog} --help tells more")


def command(main: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Decorate a command's `main(argv)`: errors become one line on stderr and an exit code."""

    @wraps(main)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if not gc.isenabled():  # by our __init__.py
            gc.freeze()  # what has been imported is not looked through again
            gc.enable()
        try:
            main(*args, **kwargs)
        except UserError as error:
            _end_with(f"error: {error}", 2)
        except RunFailed as error:
            _end_with(f"failed: {error}", 1)
        except Stopped as stopped:
            _end_with(str(stopped), stopped.exit_code, same_on_all_ranks=True)
        except BrokenPipeError:  # the reader of our output has gone; say nothing more to it
            sys.stdout = open(os.devnull, "w")
            sys.exit(1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return wrapped


def _end_with(message: str, code: int, same_on_all_ranks: bool = False) -> NoReturn:
    """Say why, and leave.

    Of several processes all usually meet the same error. The first one speaks; a launcher then ends
    the others. One that is still there after PATIENCE met an error of its own, and says so.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank > 0 and not same_on_all_ranks:
        time.sleep(PATIENCE)
        message = f"rank {rank}: {message}"
    if rank == 0 or not same_on_all_ranks:
        print(message, file=sys.stderr, flush=True)
    sys.exit(code)
