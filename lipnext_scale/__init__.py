"""lipnext_scale: training certified-robust LipNeXt classifiers at scale."""

import gc
import sys

__version__ = "0.1.0"

# While Python looks for the module that `-m` names, sys.argv[0] is "-m".
if sys.argv[:1] == ["-m"] and any(word.startswith("lipnext_scale.") for word in sys.orig_argv):
    # One of our commands. Until it begins (`errors.command`) modules are imported: hundreds of
    # thousands of objects that stay, and nothing to collect.
    gc.disable()
