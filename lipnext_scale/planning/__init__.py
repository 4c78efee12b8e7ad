"""What a run will take, from its own program: `walk` and its ledger, times and memory."""
