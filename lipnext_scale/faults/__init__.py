"""What a run does when something goes wrong: a second run in its place, NaNs, hangs."""
