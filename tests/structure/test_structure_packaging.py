"""What pyproject.toml says and other files repeat."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_an_extra_that_is_named_anywhere_is_there() -> None:
    """In commands of documents and messages, such as pip install 'lipnext_scale[prep,ffcv]'."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [*ROOT.glob("*.md"), ROOT / "Makefile", *ROOT.glob("docs/*.md")]
    files += [
        path for name in ("lipnext_scale", "data_prep") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    files += ROOT.glob("benchmarks/*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = re.findall(r"'(?:lipnext_scale|\.)\[([a-z,]+)\]'", text)
    assert {"deepspeed", "ffcv", "prep", "bench"} <= set(named)
    assert {extra for names in named for extra in names.split(",")} <= {
        *project["optional-dependencies"]
    }
