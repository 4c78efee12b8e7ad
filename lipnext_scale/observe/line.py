"""The line that a run prints at every log interval, and words for numbers."""

import math

COLUMNS = 120


def console_line(
    told: dict[str, float], epochs: int, step: int, total_steps: int, seconds_to_go: float
) -> str:
    """What is not known is left out, and the number of all steps where the line would be long."""
    epoch = min(epochs, max(1, math.ceil(told["train/epoch"] - 1e-9)))
    parts = [
        f"epoch {epoch}/{epochs}",
        f"step {step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {told['train/loss']:.4f}",
        f"acc {told['train/accuracy']:.3f}",
        f"lr {told['train/lr']:.1e}",
        f"ε {told['train/epsilon']:.3f}",
        f"{told['images_per_second']:,.0f} img/s",
    ]
    if "mfu" in told:
        parts.append(f"MFU {told['mfu']:.0%}")
    parts.append(f"wait {told['data/wait_share']:.0%}")
    memory = told.get("memory/gpu_allocated_gb", told.get("memory/resident_gb"))
    if memory is not None:
        parts.append(f"{memory:.1f} GB")
    parts.append(f"ETA {duration(seconds_to_go)}")
    if len("  ".join(parts)) > COLUMNS:
        parts[1] = f"step {step}"
    return "  ".join(parts)


def score_line(scores: dict[str, float]) -> str:
    """`test/clean_accuracy` and its fellows, a line below the step's."""
    return "  " + "  ".join(f"{name} {value:.4f}" for name, value in scores.items())


def duration(seconds: float) -> str:
    """0:07, 12:05, 3:12:05, 2 d 4 h."""
    if not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"
