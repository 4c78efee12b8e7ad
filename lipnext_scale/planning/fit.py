"""Does a run fit? Memory at the highest point of its steps, and the size of its checkpoints."""

from dataclasses import replace

import torch

from lipnext_scale.config.recipe import Recipe
from lipnext_scale.distributed import ParallelConfig
from lipnext_scale.distributed.processes import choose_device
from lipnext_scale.planning.walk import walk_recipe
from lipnext_scale.utils.cpu import memory_limit

# Beside tensors: the interpreter and its libraries; the CUDA context and NCCL's buffers.
BESIDE = {"cpu": 5e8, "cuda": 2e9}


def memory_needed(recipe: Recipe, ranks: int, per_node: int) -> tuple[float, float, str]:
    """(bytes that a process takes at most, bytes that it has here, where in a step it does)."""
    device = choose_device(recipe.run.device).type
    walked = walk_recipe(recipe, ranks, per_node, device)
    _, phase, place = max(walked.memory.values(), key=lambda found: sum(found[0].values()))
    if device == "cuda":
        there = torch.cuda.get_device_properties(0).total_memory
    else:
        there = memory_limit()[0] // per_node
    return walked.peak + BESIDE[device], there, f"{phase}, {place}"


def checkpoint_bytes(recipe: Recipe) -> int:
    """The same for every engine and number of processes."""
    alone = replace(recipe, parallel=ParallelConfig())
    return walk_recipe(alone, 1, 1, "cpu").checkpoint
