"""Radii as people write and read them."""

from lipnext_scale.config import as_float
from lipnext_scale.errors import UserError

DEFAULT_RADII = (36 / 255, 72 / 255, 108 / 255, 0.5, 1.0)


def parse_radii(texts: list[str] | None) -> tuple[float, ...]:
    """What --radii was given, in rising order; the usual ones if nothing was."""
    radii = set()
    for text in texts or []:
        radius = as_float(text)
        if radius is None or not 0 <= radius < float("inf"):
            raise UserError(f"--radii {text}: must be a number of at least 0, such as 36/255")
        radii.add(radius)
    return tuple(sorted(radii)) or DEFAULT_RADII


def radius_name(radius: float) -> str:
    """36/255 where it is such a fraction, else the number."""
    numerator = radius * 255
    if float(f"{radius:.3g}") == radius or abs(numerator - round(numerator)) > 1e-6:
        return f"{radius:g}"
    return f"{round(numerator)}/255"
