"""Ways of being 1-Lipschitz, one file a family (docs/layers.md). `model.layer` chooses one."""

from typing import Literal

from lipnext_scale.models.layers.base import Family, Gated, Linear
from lipnext_scale.models.layers.cayley import CAYLEY

__all__ = ["FAMILIES", "Family", "Gated", "LayerName", "Linear"]

# manifold has orthogonal matrices themselves, and an optimizer that keeps them so.
LayerName = Literal["manifold", "cayley"]
FAMILIES: dict[str, Family] = {"cayley": CAYLEY}
