"""lipnext_scale: training certified-robust LipNeXt classifiers at scale."""

import signal
import sys

__version__ = "0.1.0"

# Ctrl-C while `python -m` imports torch for seconds: the end, without a traceback.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
