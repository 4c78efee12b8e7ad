"""The command's options, and what is said where FFCV is not installed."""

import re
import subprocess
import sys

import pytest
from beton_making import WITHOUT_FFCV, failure, write_shards

from lipnext_scale.data.index import INSTALL

WRONG = {
    "name": ("--out set.bin", "--out .*set.bin: must end in .beton"),
    "no out": ("", "--shards and --out are needed, or --index"),
    "quality": ("--write-mode jpg --jpeg-quality 101", "--jpeg-quality 101: must be from 1 to 100"),
    "quality of raw": (
        "--jpeg-quality 90",
        "--jpeg-quality 90: means nothing with --write-mode raw",
    ),
    "share": ("--write-mode proportion --compress-probability 2", "must be from 0 to 1"),
    "share of jpg": ("--write-mode jpg --compress-probability 0", "0.0: means nothing with"),
    "smart": ("--write-mode smart", "--write-mode smart: needs --smart-threshold"),
    "resolution": ("--max-resolution 0", "--max-resolution 0: must be from 1 to 65535"),
    "workers": ("--workers 0", "--workers 0: must be at least 1"),
    "mode": ("--write-mode png", "argument --write-mode: invalid choice"),
    "no FFCV file": ("--index a.tar", "--index a.tar: must end in .beton"),
    "both": ("--index a.beton", "--index: goes without --shards"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_named(tmp_path, capsys, monkeypatch, case):
    """Every mistake is told before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    options, message = WRONG[case]
    out = [] if case in ("no out", "both") or "--out" in options else ["--out", "set.beton"]
    others = [] if case == "no FFCV file" else ["--shards", f"{tmp_path}/in-*.tar", *out]
    said = failure(capsys, *others, *options.split())
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_messages_say_what_to_install(tmp_path):
    """Of writing, of --index and of training on a file without an index."""
    write_shards(tmp_path)
    (tmp_path / "a.beton").write_bytes(b"some bytes")
    code = """
from data_prep.ffcv import main
from lipnext_scale.data.catalog import open_catalog
from lipnext_scale.errors import command

train = command(lambda: open_catalog('a.beton', 'data.train'))
write = lambda: main(['--shards', 'in-*.tar', '--out', 'b.beton'])
for run in (write, lambda: main(['--index', 'a.beton']), train):
    try:
        run()
    except SystemExit as end:
        assert end.code == 2
"""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_FFCV + code], capture_output=True, text=True, cwd=tmp_path
    )
    written, indexed, trained = ended.stderr.splitlines()
    assert written == f"error: writing FFCV files needs FFCV: {INSTALL}"
    assert indexed == f"error: --index a.beton: reading it needs FFCV: {INSTALL}"
    assert trained.startswith(
        f"error: a.beton: has no index and reading it needs FFCV: {INSTALL}; "
    )
    assert trained.endswith("where FFCV is installed: python -m data_prep.ffcv --index a.beton")
    assert not list(tmp_path.glob("b.*")) and not list(tmp_path.glob("*.index.*"))
