"""`Certifier`: a model that gives each prediction with its proven radius.

certifier = Certifier.load("digits.safetensors")
labels, radii = certifier(images)
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from lipnext_scale.certification.bounds import BlockFacts, measure_blocks
from lipnext_scale.certification.radius import certified_margins, guarantee
from lipnext_scale.checkpoint import SUMS
from lipnext_scale.checkpoint.exports import is_export, load_export
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import to_unit_range
from lipnext_scale.models import LipNeXt
from lipnext_scale.utils.errors import UserError

# --------------------------------------------------------------------------------------------------
# A model from a run directory, one of its checkpoints, or an export.


def load_model(path: str | Path) -> LipNeXt:
    """The slow weights of a run's newest checkpoint or of a given one, or an export."""
    path = Path(path)
    if is_export(path):
        return load_export(path).eval()
    run = run_of(path)
    if run is None:
        raise UserError(f"{path}: no such run directory, checkpoint or export")
    return run.load_model(path if _is_checkpoint(path) else None).eval()


def run_of(path: Path) -> RunDirectory | None:
    """The run that a run directory or a checkpoint belongs to; None for an export."""
    if is_export(path) or not path.is_dir():
        return None
    return RunDirectory(path.absolute().parent.parent if _is_checkpoint(path) else path)


def _is_checkpoint(path: Path) -> bool:
    return (path / SUMS).is_file()


HASHED_AT_ONCE = 1 << 24


class Certifier:
    """model: in float32 or float64, the arithmetic that is certified.

    blocks: the facts of its blocks, if known; they are trusted. lipschitz: replaces the proven
    bound K, for experiments: the radii are then no certificate.
    """

    def __init__(
        self,
        model: LipNeXt,
        blocks: dict[int, BlockFacts] | None = None,
        lipschitz: float | None = None,
    ) -> None:
        require_certifiable(model)
        self.model = model.eval()
        self.assumed = lipschitz is not None
        self._known = guarantee(model, blocks or measure_blocks(model), lipschitz)
        self._seen = fingerprint(model)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "Certifier":
        """Of a run directory, a checkpoint or an export, in float64."""
        return cls(load_model(path).to(device, torch.float64))

    @property
    def lipschitz_bound(self) -> float:
        """K, proven from the stored weights."""
        return self._known.lipschitz

    @property
    def dtype(self) -> torch.dtype:
        return self.model.head.weight.dtype

    def feature_rounding(self) -> float:
        """The largest distance of computed features from exact ones, over all images in [0, 1]."""
        config = self.model.config
        corner = torch.tensor(config.in_channels * config.image_size**2 / 4.0).sqrt()
        return self._known.rounding.error.at(corner.double()).item()

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(labels, radii) of NCHW images, floating point in [0, 1] or uint8; radii are float64.

        No image within a label's radius, in the l2 norm of pixels in [0, 1], has another label.
        """
        require_certifiable(self.model)
        if fingerprint(self.model) != self._seen:
            raise ValueError("the weights have changed since K was computed: make a new Certifier")
        device = self.model.head.weight.device
        if isinstance(images, Tensor) and images.dtype == torch.uint8:
            images = to_unit_range(images, device, self.dtype)
        images = _checked(images, self.dtype).to(device)
        return certified_margins(self.model, images, self._known)


def certified_radii(
    model: LipNeXt, images: Tensor, lipschitz: float | None = None
) -> tuple[Tensor, Tensor]:
    """(labels, radii) of images; a `Certifier` saves measuring the weights each time."""
    return Certifier(model, lipschitz=lipschitz)(images)


def _checked(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Refuses images for which a radius would mean something else."""
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images are {kind}: must be a tensor, uint8 or floating point in [0, 1]")
    if torch.promote_types(images.dtype, dtype) != dtype:
        raise ValueError(f"images are {images.dtype}, the weights {dtype}: use model.double()")
    # Points somewhat outside [0, 1] are legitimate (attacks); pixels up to 255 are not.
    if images.numel() and not bool(images.abs().max() < 16):
        raise ValueError(f"images go up to {images.abs().max():g}: this model takes [0, 1]")
    return images.to(dtype)


def require_certifiable(model: LipNeXt) -> None:
    """A forward pass in bfloat16 or TF32 is another function than the one that K bounds."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtypes |= {group.compute_dtype for group in model.block_groups() if group.compute_dtype}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(
            f"a certificate needs weights and a forward pass in float32 or in float64, not {names}"
        )
    hooks = [*_global_forward_hooks, *_global_forward_pre_hooks]
    for module in model.modules():
        hooks += [*module._forward_hooks, *module._forward_pre_hooks]
    if hooks:
        raise ValueError("a certificate needs a model without forward hooks: they may change it")
    if dtypes == {torch.float32}:
        precision = product_precision(model.head.weight.device.type)
        if precision not in ("ieee", "none", "highest"):
            raise ValueError(
                f"a certificate needs full float32 products, and torch is set to {precision}: "
                'torch.set_float32_matmul_precision("highest"), or model.double()'
            )


def product_precision(device_type: str) -> str:
    """The precision of float32 products, by torch's new interface or, before 2.9, the old one.

    The new one sees what was set by the old one; the old one raises after the new was used.
    """
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        if os.environ.get(name, "STRICT").upper() != "STRICT":
            return f"{name}={os.environ[name]}"
    if device_type == "cuda" and os.environ.get("NVIDIA_TF32_OVERRIDE", "0") != "0":
        return "NVIDIA_TF32_OVERRIDE"
    backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    new = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    return new if new is not None else torch.get_float32_matmul_precision()


@torch.no_grad()
def fingerprint(model: LipNeXt) -> list[object]:
    """Changes when the function does: the architecture, and a hash of all bits and their places.

    A hash, because torch's own count of writes misses those to `.data`.
    """
    found: list[object] = [model.config, *(group.spec for group in model.block_groups())]
    for parameter in model.parameters():
        words = parameter.detach().reshape(-1).view(torch.int32)
        for start in range(0, len(words), HASHED_AT_ONCE):
            part = words[start : start + HASHED_AT_ONCE]
            factors = torch.arange(start + 1, start + 1 + len(part), device=part.device)
            factors = factors * 0x1E3779B97F4A7C15  # and what overflows is dropped
            factors = (factors ^ (factors >> 29)) | 1
            found.append(int((part * factors).sum()))
    return found
