"""Reading DeepSpeed's checkpoints without DeepSpeed, in one process, into pieces of ours.

Its files are pickles, which can run code. They are read by torch's unpickler that knows tensors and
plain containers only; the few classes of DeepSpeed in them are replaced by ones that do nothing.
"""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipnext_scale.checkpoint import Pieces
from lipnext_scale.errors import UserError
from lipnext_scale.models import LipNeXt
from lipnext_scale.optim import split_parameters
from lipnext_scale.parallel.zero_layout import flat_group_slots, parameter_slots
from lipnext_scale.parallel.zero_optimizers import Partition
from lipnext_scale.parallel.zero_pieces import matrix_pieces, parameter_pieces, parts_of

FACTS, FORMAT = "lipnext_scale", 1  # in DeepSpeed's client_state
MODEL = "model."  # before the names of our parameters: where the engine has put the model


class _Ignored:
    """In place of an object of DeepSpeed that we do not look at."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass


_IN_PLACE: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Ignored, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Ignored, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def _read(file: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(_IN_PLACE):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except pickle.UnpicklingError:  # whose text is advice to trust it
        reason = "it is cut off, or holds more than numbers"
        raise UserError(f"{file}: is not a file of a DeepSpeed checkpoint: {reason}") from None
    except (RuntimeError, EOFError, ValueError, LookupError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file}: is not a file of a DeepSpeed checkpoint: {said}") from None


@dataclass(frozen=True)
class ModelStates:
    """What a checkpoint says of itself.

    shapes: of the parameters in each partition, in order, by DeepSpeed's names.
    """

    path: Path
    stage: int
    ranks: int
    facts: dict[str, Any]
    shapes: list[dict[str, torch.Size]]

    @staticmethod
    def read(path: Path) -> "ModelStates":
        found = [file for file in (_model_file(path, stage) for stage in (1, 3)) if file.exists()]
        if not found:
            raise UserError(f"{path}: is not a DeepSpeed checkpoint: it has no *_model_states.pt")
        if len(found) == 2:  # of which DeepSpeed would take one and we perhaps the other
            raise UserError(f"{path}: holds files of ZeRO-3 and of another stage: {found[0].name}")
        stored = _read(found[0])
        facts = stored.get(FACTS)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise UserError(f"{path}: is not of a run of lipnext_scale of format {FORMAT}")
        facts = {key: value for key, value in facts.items() if key != "format"}
        stage = stored["ds_config"]["zero_optimization"]["stage"]
        return ModelStates(path, stage, stored["dp_world_size"], facts, stored["param_shapes"])

    def shapes_of_model(self) -> dict[str, tuple[int, ...]]:
        """By our names, without padding."""
        return {
            name.removeprefix(MODEL): tuple(shape)
            for shapes in self.shapes
            for name, shape in shapes.items()
            if name.startswith(MODEL)
        }


def _model_file(path: Path, stage: int, rank: int = 0) -> Path:
    """ZeRO-3 has one of every rank, the other stages one in all."""
    of_rank = f"zero_pp_rank_{rank}_" if stage == 3 else ""
    return path / f"{of_rank}mp_rank_00_model_states.pt"


def _optimizer_file(path: Path, rank: int) -> Path:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    bf16 = path / f"bf16_{name}"  # as DeepSpeed calls it with that precision
    return bf16 if bf16.exists() else path / name


def files_of(path: Path, stage: int, rank: int) -> list[Path]:
    """What a rank writes, or reads before it reads others'."""
    return [_model_file(path, stage, rank), _optimizer_file(path, rank)]


def require_numbers_alone(path: Path, stage: int, rank: int) -> None:
    """Refuse files that cannot be read, or that would run code where DeepSpeed unpickles them."""
    for file in files_of(path, stage, rank):
        _read(file)


def optimizer_states(path: Path, rank: int) -> dict[str, Any]:
    """What ZeRO has stored of a rank: partitions and the state of the optimizers."""
    return _read(_optimizer_file(path, rank))["optimizer_state_dict"]


def stored_pieces(
    states: ModelStates, model: LipNeXt, advance: Callable[[], None] = lambda: None
) -> Pieces:
    """All pieces of the checkpoint, whole.

    model: any with the parameters of the run's, in the same banks.
    advance: is told of every rank that was read.
    """
    parts, shapes = parts_of(model), {n: p.shape for n, p in model.named_parameters()}
    orthogonal = {name for name, _ in split_parameters(model)[0]}
    pieces: Pieces = {}
    cut: dict[tuple[str, str], Tensor] = {}  # kind, parameter → its numbers, out of all ranks
    for rank in range(states.ranks):
        for partition, tensors in _partitions(states, rank, orthogonal, model.config.width):
            for kind, tensor in tensors.items():
                if partition.orthogonal:
                    pieces |= matrix_pieces(partition, kind, tensor, parts)
                    continue
                for name, slot in partition.held():
                    empty = torch.empty(shapes[name].numel())
                    cut.setdefault((kind, name), empty)[slot.of_parameter] = tensor[slot.there]
        advance()
    for (kind, name), whole in cut.items():
        pieces |= parameter_pieces(kind, whole.view(shapes[name]), parts[name])
    return pieces


def _partitions(
    states: ModelStates, rank: int, orthogonal: set[str], width: int
) -> Iterator[tuple[Partition, dict[str, Tensor]]]:
    """The partitions of a rank, and what there is of each: its weights and the state of these."""
    stored = optimizer_states(states.path, rank)
    whole = states.stage == 3
    flats = stored["fp32_flat_groups" if whole else "single_partition_of_fp32_groups"]
    state = stored["optimizer_state_dict" if whole else "base_optimizer_state"]["state"]
    slots_of = parameter_slots if whole else flat_group_slots
    for number, shapes in enumerate(states.shapes):
        names = [n.removeprefix(MODEL) if n.startswith(MODEL) else "" for n in shapes]
        length, slots = slots_of([shape.numel() for shape in shapes.values()], states.ranks, rank)
        flat = flats[number].detach()
        padded = torch.cat([flat, flat.new_zeros(length - flat.numel())])  # which is not stored
        has_matrices = names[0] in orthogonal
        layout = length, slots
        partition = Partition.of(padded, names, layout, width if has_matrices else None)
        tensors = {kind: tensor.view_as(partition.view) for kind, tensor in state[number].items()}
        yield partition, {"model": partition.view, **tensors}
