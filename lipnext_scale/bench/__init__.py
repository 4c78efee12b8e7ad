"""Measurements on the user's own machine and data: `python -m lipnext_scale.bench`."""
