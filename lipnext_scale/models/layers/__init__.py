"""Ways of being 1-Lipschitz, one file a family (docs/layers.md). `model.layer` chooses one."""

from typing import Literal

from lipnext_scale.models.layers.aol import AOL
from lipnext_scale.models.layers.base import Family, Gated, Linear
from lipnext_scale.models.layers.bro import BRO
from lipnext_scale.models.layers.cayley import CAYLEY
from lipnext_scale.models.layers.cholesky import CHOLESKY
from lipnext_scale.models.layers.conv import CONVOLUTIONS, Convolution, convolution
from lipnext_scale.models.layers.cpl import CPL
from lipnext_scale.models.layers.exp import EXP
from lipnext_scale.models.layers.lip_reg import LIP_REG
from lipnext_scale.models.layers.lot import LOT
from lipnext_scale.models.layers.sandwich import SANDWICH
from lipnext_scale.models.layers.sll import SLL

__all__ = [
    "CONVOLUTIONS",
    "FAMILIES",
    "Convolution",
    "Family",
    "Gated",
    "LayerName",
    "Linear",
    "convolution",
]

# manifold has orthogonal matrices themselves, and an optimizer that keeps them so.
LayerName = Literal[
    "manifold",
    "cayley",
    "exp",
    "lot",
    "cholesky",
    "bro",
    "aol",
    "cpl",
    "sll",
    "sandwich",
    "lip_reg",
]
FAMILIES: dict[str, Family] = {
    "cayley": CAYLEY,
    "exp": EXP,
    "lot": LOT,
    "cholesky": CHOLESKY,
    "bro": BRO,
    "aol": AOL,
    "cpl": CPL,
    "sll": SLL,
    "sandwich": SANDWICH,
    "lip_reg": LIP_REG,
}
