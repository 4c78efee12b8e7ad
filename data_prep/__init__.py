"""Commands that turn data sets into shards: `python -m data_prep.NAME --help`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`write_shards`, imported when it is used: commands settle some things before torch is."""
    if name != "write_shards":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from data_prep.dataset import write_shards

    return write_shards
