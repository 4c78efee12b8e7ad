"""What a run records: metrics, lines, scores, pictures, profiles (docs/observing.md)."""

from lipnext_scale.observe.observer import Observer

__all__ = ["Observer"]
