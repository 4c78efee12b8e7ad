"""The learning rate as a pure function of the step."""

import math


def learning_rate(
    step: int, lr: float, total_steps: int, warmup_steps: int, final_ratio: float
) -> float:
    """Linear warm-up to `lr`, then a half cosine down to `lr·final_ratio` at the last step.

    `step` counts the steps already taken, so the first one has lr/warmup_steps, never 0.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return lr * (final_ratio + (1 - final_ratio) * cosine)
