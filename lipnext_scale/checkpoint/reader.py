"""Reading checkpoints: their facts, what is in them, and pieces of it."""

import json
import pickle
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lipnext_scale.agreement import Group, everywhere
from lipnext_scale.checkpoint.pieces import Pieces
from lipnext_scale.checkpoint.planner import PieceLoadPlanner
from lipnext_scale.checkpoint.storage import SafeReader, read_metadata, run_dcp
from lipnext_scale.errors import UserError

FACTS = "facts.json"
FORMAT = 2
# What DCP and torch.load raise for files that are not what they should be.
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AssertionError,
    pickle.UnpicklingError,
)


def read_facts(path: Path) -> dict[str, Any]:
    """What the writer was told of the run, with the "step" and the "format"."""
    file = path / FACTS
    try:
        facts = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is not readable JSON: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise UserError(f"{file}: is not of a checkpoint of format {FORMAT}")
    return facts


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The names of the tensors in a checkpoint, and their whole shapes."""
    tensors = read_metadata(path).state_dict_metadata
    return {
        name: tuple(stored.size)
        for name, stored in tensors.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def load_pieces(path: Path, pieces: Pieces, group: Group = None) -> None:
    """Read into the pieces' tensors, in place. That the files are intact is verified before."""
    found: list[Metadata] = []

    def look() -> None:
        found.append(read_metadata(path))
        _require_fit(path, pieces, found[0])

    everywhere(group, look)
    run_dcp(
        dcp.load,
        pieces,
        group,
        expected=_UNREADABLE,
        complaint=f"{path}: is not a readable checkpoint",
        storage_reader=SafeReader(path, found[0]),
        planner=PieceLoadPlanner(),
    )


def _require_fit(path: Path, pieces: Pieces, metadata: Metadata) -> None:
    tensors = metadata.state_dict_metadata
    for name, piece in pieces.items():
        if name not in tensors:
            raise UserError(f"{path}: has no tensor {name}, of shape {piece.shape} in this run")
        stored = tensors[name]
        assert isinstance(stored, TensorStorageMetadata)
        if tuple(stored.size) != piece.shape:
            raise UserError(
                f"{path}: its {name} has shape {tuple(stored.size)}, in this run {piece.shape}"
            )
        if stored.properties.dtype != piece.tensor.dtype:
            raise UserError(
                f"{path}: its {name} is {stored.properties.dtype}, in this run {piece.tensor.dtype}"
            )
