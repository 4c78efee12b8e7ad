"""Watch runs while they train, in a terminal.

    python -m lipnext_scale.watch RUN [RUN ...]              until Ctrl-C
    python -m lipnext_scale.watch RUN --once                 what there is now, as plain text
    python -m lipnext_scale.watch RUN --picture summary.png  the summary, at any time

It reads what the runs write, metrics.jsonl and the names of the checkpoints, and asks nothing of
the processes that train: on another machine with the same files it works as well.
"""

import argparse
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lipnext_scale.errors import ArgumentParser, UserError, command
from lipnext_scale.observe.live import FollowedRun, render

# Another screen without a cursor, and back: what stood in the terminal before returns.
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, END_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    runs = [FollowedRun(path) for path in arguments.runs]
    for run in runs:
        run.refresh()
    if arguments.picture:
        _draw(runs, Path(arguments.picture))
    elif arguments.once or not sys.stdout.isatty():
        width = shutil.get_terminal_size((100, 24)).columns
        print("\n".join(render(runs, width, colour=False)))
    else:
        _live(runs, arguments.every)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="lipnext_scale.watch", description="Watch runs while they train.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, such as runs/digits")
    parser.add_argument("--once", action="store_true", help="print what there is now, and end")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between looks (2)"
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the summary of one run into FILE")
    arguments = parser.parse_args(argv)
    if not 0.05 <= arguments.every <= 3600:
        raise UserError(f"--every {arguments.every:g}: must be from 0.05 to 3600 seconds")
    if arguments.picture and len(arguments.runs) > 1:
        raise UserError(f"--picture {arguments.picture}: shows one run; name one")
    return arguments


def _draw(runs: Sequence[FollowedRun], path: Path) -> None:
    from lipnext_scale.metrics import read_records
    from lipnext_scale.observe.picture import draw_summary  # matplotlib is slow to import

    directory = runs[0].directory
    if "train/loss" not in runs[0].curves:
        raise UserError(f"{directory.metrics}: holds no record of training to draw yet")
    try:
        draw_summary(read_records(directory.metrics), str(directory.path), path)
    except OSError as error:
        raise UserError(f"--picture {path}: cannot be written: {error.strerror}") from None
    print(path)


def _live(runs: Sequence[FollowedRun], every: float) -> None:
    """Draw again every so often, and at once when the terminal has another size."""
    lines: list[str] = []
    print(ENTER, end="", flush=True)
    try:
        with _resizes() as resized:
            while True:
                for run in runs:
                    run.refresh()
                lines = _draw_screen(runs)
                if select.select([resized], [], [], every)[0]:
                    resized.recv(4096)
    except KeyboardInterrupt:
        pass  # the way out
    finally:
        print(LEAVE, end="", flush=True)
    print("\n".join(lines))


@contextmanager
def _resizes() -> Iterator[socket.socket]:
    """Has something to be read once the terminal has another size, or another signal has come.

    Python itself writes there. A handler of ours, which runs in the middle of whatever is being
    done, could do nothing with a lock in it.
    """
    told, teller = socket.socketpair()
    with told, teller:
        told.setblocking(False)
        teller.setblocking(False)
        handler = signal.signal(signal.SIGWINCH, lambda *_: None)
        descriptor = signal.set_wakeup_fd(teller.fileno(), warn_on_full_buffer=False)
        try:
            yield told
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGWINCH, handler)


def _draw_screen(runs: Sequence[FollowedRun]) -> list[str]:
    """Line over line, so that nothing flickers; what does not fit is left out, and said."""
    size = shutil.get_terminal_size()
    lines = render(runs, size.columns, colour=True)
    shown = lines
    if len(lines) > size.lines:
        shown = [*lines[: size.lines - 1], f"… {len(lines) - size.lines + 1} more lines"]
    screen = (END_OF_LINE + "\r\n").join(shown) + END_OF_LINE + REST_OF_SCREEN
    print(HOME + screen, end="", flush=True)
    return lines


if __name__ == "__main__":
    main()
