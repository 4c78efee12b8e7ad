"""What a run tells of itself: records, lines, pictures, profiles (docs/observing.md)."""

from lipnext_scale.observe.observer import Observer
from lipnext_scale.observe.scores import to_unit_range

__all__ = ["Observer", "to_unit_range"]
