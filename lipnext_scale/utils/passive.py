"""Imported first by every command, before torch. A program that imports the package decides itself.

Idle threads sleep, they do not spin: spinning ones take the cores from other processes, and from
the threads that they wait for (docs/results/2026-11-18-passive-waiting.md). And Ctrl-C while torch
is imported, for seconds, is the end without a traceback, until `utils.errors.command` catches it.
"""

import os
import signal
import sys

_started = getattr(sys.modules["__main__"], "__spec__", None)  # python -m has one
if _started is not None and _started.name.split(".")[0] in ("lipnext_scale", "data_prep"):
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
