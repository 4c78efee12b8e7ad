"""Commands that turn data sets into shards: `python -m data_prep.NAME --help`."""
