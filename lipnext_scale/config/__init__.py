"""What defines a run and where it lives."""
