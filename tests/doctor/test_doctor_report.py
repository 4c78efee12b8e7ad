"""Findings: a line each, an exit code, and checks that cannot take the doctor with them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipnext_scale.config import ConfigError
from lipnext_scale.doctor.report import (
    Finding,
    as_json,
    as_text,
    exit_code,
    look,
    of_error,
    ok,
    size,
    warn,
    wrong,
)
from lipnext_scale.errors import UserError

FINDINGS = st.builds(
    Finding, st.text(), st.sampled_from(["ok", "warn", "wrong"]), st.text(), st.text(), st.text()
)


def test_a_line_has_the_state_the_fact_and_what_mends_it():
    """What a person reads."""
    told = as_text(
        [ok("python", "3.11"), warn("gpu", "none", "--gpus all"), wrong("a", "b", "c=1")]
    )
    assert told.splitlines() == [
        "ok     python: 3.11",
        "warn   gpu: none  →  --gpus all",
        "wrong  a: b  →  c=1",
        "1 wrong, 1 warn, 1 ok",
    ]


@settings(max_examples=25, deadline=None)
@given(st.lists(FINDINGS, max_size=4))
def test_programs_get_the_same_findings(findings):
    """--json loses nothing, and its verdict is the exit code's."""
    values = json.loads(as_json(findings))
    assert [Finding(**each) for each in values["findings"]] == findings
    assert values["wrong"] == bool(exit_code(findings))
    assert exit_code(findings) == any(f.state == "wrong" for f in findings)


def test_a_check_that_crashes_is_wrong_and_names_its_error():
    """The others are still looked at."""

    def crash() -> Finding:
        raise ZeroDivisionError("of\na check")

    (found,) = look("disk", crash)
    assert found.state == "wrong" and found.check == "disk" and found.mend
    assert "ZeroDivisionError: of a check" in found.text and "\n" not in found.line()


def test_mistakes_of_the_user_bring_their_own_remedy():
    """What an error says would be right is what mends it."""
    found = of_error("configuration", ConfigError("data.workers", -1, "must be at least 0"), "")
    assert (found.text, found.mend) == ("data.workers = -1", "must be at least 0")
    found = of_error("data", UserError("x.tar: is missing; copy it"), "something else")
    assert (found.text, found.mend) == ("x.tar: is missing", "copy it")
    assert of_error("data", UserError("x.tar: is short"), "copy it").mend == "copy it"


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0.0 kB"), (2.9e6, "2.9 MB"), (25.3e9, "25.3 GB"), (4e13, "40.0 TB")]
)
def test_sizes_are_for_people(number, told):
    """Decimal units, as in the plan and the metrics."""
    assert size(number) == told
