"""Looking at shards that are there: their faults, and what they hold."""
