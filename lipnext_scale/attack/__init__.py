"""Attacks: to test certificates, and to see how robust a model is beyond what is proven."""

from lipnext_scale.attack.apgd import apgd
from lipnext_scale.attack.attacker import (
    METHODS,
    Attacker,
    AttackSettings,
    Points,
    Targets,
    search_copy,
)
from lipnext_scale.attack.hunt import AttackExample, hunt, nearest_change, robust_at
from lipnext_scale.attack.pgd import pgd, smallest_margins
from lipnext_scale.attack.starts import random_starts

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
