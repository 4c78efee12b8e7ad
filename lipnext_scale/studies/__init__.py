"""Studies: many runs as one experiment, and what compares runs that exist."""
