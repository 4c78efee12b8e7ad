"""Stable names: what a weight is called whatever the grouping and the layout of the parameters.

    blocks.{i}.R, blocks.{i}.M (product) or blocks.{i}.W (merged), blocks.{i}.bias, blocks.{i}.pos,
    head.weight, head.bias

Exports and checkpoints speak of these alone, so they fit every grouping, layout and world size.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from lipnext_scale.models.lipnext import LipNeXt


@dataclass(frozen=True)
class NamedPart:
    """A tensor of the network: a whole parameter, or entry `index` of its first dimension."""

    name: str
    parameter: nn.Parameter
    index: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.parameter.shape)
        return shape if self.index is None else shape[1:]

    def of(self, tensor: Tensor) -> Tensor:
        """The part's view of a tensor that is laid out as the whole parameter."""
        return tensor if self.index is None else tensor[self.index]


def named_parts(model: LipNeXt) -> list[NamedPart]:
    """Every number of the network in exactly one part, in the order of the blocks."""
    second = "M" if model.config.parametrisation == "product" else "W"
    parts: list[NamedPart] = []
    for group in model.block_groups():
        for index in range(2 * group.count):
            name = f"blocks.{group.first + index // 2}.{second if index % 2 else 'R'}"
            if group.layout == "bank":
                parts.append(NamedPart(name, group.bank, index))
            else:
                parts.append(NamedPart(name, group.matrices[index]))
        for index in range(group.count):
            block = f"blocks.{group.first + index}"
            parts.append(NamedPart(f"{block}.bias", group.bias, index))
            if group.pos is not None:
                parts.append(NamedPart(f"{block}.pos", group.pos, index))
    parts.append(NamedPart("head.weight", model.head.weight))
    parts.append(NamedPart("head.bias", model.head.bias))
    return parts
