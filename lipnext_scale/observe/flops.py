"""The arithmetic of a model and the best that a device could do: together the MFU.

What is counted is what the network itself needs, as is usual: two products a block forward, and
twice as many backward. The optimizer's products, M·Rᵀ and what is recomputed are not, so the MFU
says what share of the device trains the network.
"""

import re

import torch

from lipnext_scale.models import LipNeXtConfig

# TFLOP/s of dense products by words of the device's name, the more particular ones first:
# (bf16, fp32 without TF32, which would not keep a matrix orthogonal). Nominal; run.peak_tflops goes
# over them.
PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "H200": (989.5, 67.0),
    "GH200": (989.5, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.5, 67.0),
    "H800": (989.5, 67.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A40": (149.7, 37.4),
    "A10": (125.0, 31.2),
    "MI300X": (1307.4, 163.4),
    "MI250X": (383.0, 95.7),
}


def training_flops_per_image(config: LipNeXtConfig) -> float:
    """Forward and backward: 6 for each entry of a matrix and each token, as a product has 2."""
    tokens = (config.image_size // config.patch_size) ** 2
    return 6.0 * (config.bank_parameters * tokens + config.width * config.num_classes)


def peak_flops(told: float, device: torch.device, precision: str) -> float | None:
    """Of one device; None where nothing is known. told: run.peak_tflops, 0 if not given."""
    if told:
        return told * 1e12
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device), precision)


def peak_by_name(name: str, precision: str) -> float | None:
    for words, (bf16, fp32) in PEAKS.items():
        if re.search(rf"\b{words}\b", name, re.IGNORECASE):  # an RTX A4000 is no A40
            return 1e12 * (bf16 if precision == "bf16" else fp32)
    return None
