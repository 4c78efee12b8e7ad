"""Commands that turn data sets into shards: `python -m data_prep.NAME --help`."""

from data_prep.dataset import write_shards as write_shards
