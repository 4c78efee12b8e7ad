"""Imported first by every command, before torch: idle threads sleep, they do not spin.

Spinning threads take the cores from other processes, and from the threads that they wait for
(docs/results/2026-11-18-passive-waiting.md). Programs that import the package decide themselves.
"""

import os
import sys

_started = getattr(sys.modules["__main__"], "__spec__", None)  # python -m has one
if _started is not None and _started.name.split(".")[0] in ("lipnext_scale", "data_prep"):
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
