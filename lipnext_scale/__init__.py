"""lipnext_scale: training certified-robust LipNeXt classifiers at scale."""

import gc
import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:
    # Python is about to run one of our commands. Until it begins (`errors.command`), modules are
    # imported: hundreds of thousands of objects that stay, and nothing to collect.
    gc.disable()
