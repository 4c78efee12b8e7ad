"""What a check finds, and how it is told. Needs Python alone: torch may be what is missing."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from lipnext_scale.errors import UserError

State = Literal["ok", "warn", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One line. mend: the command or the key that mends it, empty where nothing is to be mended.

    host: whose finding it is, where a run has several.
    """

    check: str
    state: State
    text: str
    mend: str = ""
    host: str = ""

    def line(self) -> str:
        where = f"{self.host}: " if self.host else ""
        mend = f"  →  {self.mend}" if self.mend else ""
        return f"{self.state:<5}  {where}{self.check}: {self.text}{mend}"


Check = Callable[[], Finding | list[Finding]]


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warn(check: str, text: str, mend: str) -> Finding:
    return Finding(check, "warn", text, mend)


def wrong(check: str, text: str, mend: str) -> Finding:
    return Finding(check, "wrong", text, mend)


def of_error(check: str, error: UserError, mend: str) -> Finding:
    """A mistake of the user's as a finding; `mend` where the error itself does not say."""
    right = getattr(error, "right", "")  # a ConfigError says what would be right
    if right:
        return wrong(check, str(error).removesuffix(f": {right}"), right)
    text, _, own = str(error).partition("; ")
    return wrong(check, text, own or mend)


def look(name: str, check: Check) -> list[Finding]:
    """What a check finds. One that crashes has found something wrong, and no other is lost."""
    try:
        found = check()
    except UserError as error:
        return [of_error(name, error, "mend what the message names")]
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return [wrong(name, f"could not be looked at: {reason}", "mend what the error names")]
    return [found] if isinstance(found, Finding) else found


def exit_code(findings: Iterable[Finding]) -> int:
    return int(any(finding.state == "wrong" for finding in findings))


def as_text(findings: list[Finding]) -> str:
    counts = {state: sum(f.state == state for f in findings) for state in ("wrong", "warn", "ok")}
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    return "\n".join([*(finding.line() for finding in findings), told])


def as_json(findings: list[Finding]) -> str:
    values = {"wrong": exit_code(findings) != 0, "findings": [asdict(f) for f in findings]}
    return json.dumps(values, indent=1, ensure_ascii=False)


def size(number: float) -> str:
    """Bytes for people; mega is 10⁶ and giga 10⁹, as everywhere in the package."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number / 1e3:.1f} kB"
