"""What DeepSpeed is told: that it moves numbers, and leaves everything else to us."""

from typing import Any

from lipnext_scale.parallel.config import ParallelConfig

SMALLEST_BUCKET = 1 << 20


def deepspeed_settings(
    config: ParallelConfig, ranks: int, batch_size: int, largest: int, on_gpu: bool
) -> dict[str, Any]:
    """largest: the numbers of the largest parameter. A batch is cut into parts by the trainer."""
    parts = config.accumulation
    return {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": batch_size // (ranks * parts),
        "gradient_accumulation_steps": parts,
        "gradient_clipping": 0.0,  # the engine clips; DeepSpeed would do so at 1.0 if not told
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": config.reduce_precision,
        "zero_allow_untested_optimizer": True,  # ours
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(config, largest, on_gpu),
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def _zero(config: ParallelConfig, largest: int, on_gpu: bool) -> dict[str, Any]:
    bucket = max(largest, SMALLEST_BUCKET)
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": on_gpu and config.zero_stage > 1,
        "round_robin_gradients": False,  # it would reorder what `zero_layout` counts on
        # So many numbers are allocated, by default 2 GB of them.
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": 2 * bucket,
    }
    if config.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": largest,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,  # it would replace F.linear for everybody
        }
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    return zero
