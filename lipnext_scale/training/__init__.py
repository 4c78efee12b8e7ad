"""The training loop and what a run needs around it."""
