"""The doctor's checks: what each finds, and what fixes it. Needs Python alone, for torch may be
what is missing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lipnext_scale.utils.errors import UserError

State = Literal["wrong", "warn", "ok"]


@dataclass(frozen=True)
class Finding:
    """One line. fix: the command or key that fixes it, empty if nothing is to be fixed.

    host: where it was found, if a run has several.
    """

    check: str
    state: State
    text: str
    fix: str = ""
    host: str = ""

    def line(self) -> str:
        where = f"{self.host}: " if self.host else ""
        fix = f"  →  {self.fix}" if self.fix else ""
        return f"{self.state:<5}  {where}{self.check}: {self.text}{fix}"


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warn(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "warn", text, fix)


def wrong(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "wrong", text, fix)


def look(
    name: str, check: Callable[[], str | Finding | list[Finding]], fix: str = ""
) -> list[Finding]:
    """What a check finds; a text is what is right. An error is a finding too, so that the other
    checks still run. fix: of errors; without it a ConfigError says what would be right."""
    try:
        found = check()
    except UserError as error:
        right = "" if fix else getattr(error, "right", "")
        text = str(error).removesuffix(f": {right}") if right else str(error)
        return [wrong(name, text, fix or right or "fix what the message names")]
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return [wrong(name, reason, fix or "fix what the error names")]
    if isinstance(found, str):
        return [ok(name, found)]
    return [found] if isinstance(found, Finding) else found


def enough(check: str, text: str, needed: float, there: float, fix: str) -> Finding:
    """Whether there is room: most of it taken is a warning."""
    if needed > there:
        return wrong(check, text, fix)
    return warn(check, f"{text}: little is left", fix) if needed > 0.8 * there else ok(check, text)


def size(number: float) -> str:
    """Bytes for people; mega is 10⁶ and giga 10⁹, as everywhere in the package."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number / 1e3:.1f} kB"
