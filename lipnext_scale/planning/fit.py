"""Does a run fit? Memory at the highest point of its steps, and the size of its checkpoints."""

from dataclasses import replace

import torch

from lipnext_scale.config.recipe import Recipe
from lipnext_scale.distributed import ParallelConfig
from lipnext_scale.distributed.processes import choose_device
from lipnext_scale.planning.times import read_device
from lipnext_scale.planning.walk import walk_recipe
from lipnext_scale.utils.cpu import memory_limit


def memory_needed(recipe: Recipe, ranks: int, per_node: int) -> tuple[float, float, str]:
    """(bytes that a process takes at most, bytes that it has here, where in a step it does)."""
    device = choose_device(recipe.run.device).type
    walked = walk_recipe(recipe, ranks, per_node, device)
    _, phase, place = max(walked.memory.values(), key=lambda found: sum(found[0].values()))
    if device == "cuda":
        there = torch.cuda.get_device_properties(0).total_memory
    else:
        there = memory_limit()[0] // per_node
    beside = read_device("h100" if device == "cuda" else "cpu").overhead
    return walked.peak + beside, there, f"{phase}, {place}"


def checkpoint_bytes(recipe: Recipe) -> int:
    """The same for every engine and number of processes."""
    alone = replace(recipe, parallel=ParallelConfig())
    return walk_recipe(alone, 1, 1, "cpu").checkpoint
