"""From a collection of samples to shards and their index: in parallel, journalled, exact."""
