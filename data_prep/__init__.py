"""Commands that turn data sets into shards: `python -m data_prep.NAME --help`."""

import lipnext_scale  # noqa: F401  for its way with Ctrl-C
