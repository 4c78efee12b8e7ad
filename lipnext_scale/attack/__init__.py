"""Attacks: to test certificates, and to see how robust a model is beyond what is proven."""

from lipnext_scale.attack.hunt import (
    METHODS,
    Attacker,
    AttackExample,
    AttackSettings,
    Points,
    Targets,
    hunt,
    nearest_change,
    robust_at,
    search_copy,
)
from lipnext_scale.attack.methods import apgd, pgd, random_starts, smallest_margins

__all__ = [
    "METHODS",
    "AttackExample",
    "AttackSettings",
    "Attacker",
    "Points",
    "Targets",
    "apgd",
    "hunt",
    "nearest_change",
    "pgd",
    "random_starts",
    "robust_at",
    "search_copy",
    "smallest_margins",
]
