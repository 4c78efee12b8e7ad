"""A whole copy of the model on every process; gradients averaged by torch's DDP.

Every rank takes the same optimizer step on the same averaged gradients, so the copies stay equal.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.parallel.single import SingleEngine


class DDPEngine(SingleEngine):
    name = "ddp"

    def build(self, config: LipNeXtConfig, seed: int) -> LipNeXt:
        model = super().build(config, seed)
        self.network = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.config.reduce_precision == "bf16":
            self.network.register_comm_hook(None, average_in_bf16)
        return model

    def forward(self, images: Tensor, last: bool = True) -> tuple[Tensor, Tensor]:
        # As DDP's no_sync(), whose context would have to span the forward and the backward pass.
        self.network.require_backward_grad_sync = last  # type: ignore[assignment]
        return super().forward(images)


def average_in_bf16(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook for a bucket of gradients. (torch's own insists on NCCL.)"""
    gradients = bucket.buffer()
    halves = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(halves, async_op=True)
    return work.get_future().then(lambda _: gradients.copy_(halves))
