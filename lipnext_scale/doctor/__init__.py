"""Looks at a machine before a run does: python -m lipnext_scale.doctor."""
