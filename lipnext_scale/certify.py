"""Certify a model on a test set, and write a report of it.

    python -m lipnext_scale.certify --run runs/digits
    python -m lipnext_scale.certify --model digits.safetensors --data 'builtin:digits/test-*.tar.gz'
    torchrun --nproc-per-node 8 -m lipnext_scale.certify --model runs/imagenet_2b

Writes certificate.json, samples.csv, report.html, cra.png and examples.png into the run directory
(or --out), and prints a table. Beside a certificate of the run with other settings, and for an
older checkpoint, they go into RUN/certificates. The same command after a kill continues.
"""

import lipnext_scale.utils.passive  # noqa: F401

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lipnext_scale.certification.certificate import (
    BESIDE,
    Arrays,
    Proof,
    SampleResults,
    add_arguments,
    certificate,
    map_test_set,
    open_target,
    radii_setting,
    shared_facts,
    table,
    write_json,
    write_samples,
    writing,
)
from lipnext_scale.certification.certifier import (
    Certifier,
    Facts,
    certified_radii,
    lipschitz_bound,
    load_model,
    network_bound,
    nominal_radii,
)
from lipnext_scale.certification.report import write_report
from lipnext_scale.config.run_directory import RunDirectory
from lipnext_scale.data import TestBatch, to_unit_range
from lipnext_scale.distributed.processes import Processes
from lipnext_scale.models import LipNeXt
from lipnext_scale.utils.cpu import keep_freed_memory
from lipnext_scale.utils.errors import ArgumentParser, UserError, command

# For `from lipnext_scale.certify import Certifier`.
__all__ = ["Certifier", "certified_radii", "lipschitz_bound", "load_model", "main"]
FAST_LOOK = "a fast look in bfloat16, whose rounding is not bounded"
Radii = Callable[[Tensor], tuple[Tensor, Tensor]]  # uint8 images → (labels, radii)


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    epsilons = tuple(sorted(set(arguments.radii)))
    copy = arguments.json
    if copy is not None and (not copy.name or copy.is_dir() or not copy.parent.is_dir()):
        raise UserError(f"--json {copy}: must name a file in a directory that exists")
    keep_freed_memory()
    processes = Processes(arguments.device, alone=True)
    try:
        _certify(arguments, epsilons, processes)
    finally:
        processes.close()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lipnext_scale.certify", description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--json", type=Path, help="also write the certificate to this file")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        default="float64",
        help="arithmetic of the forward pass (default float64); bfloat16 is a fast look and "
        "certifies nothing",
    )
    return parser


def _certify(arguments: Namespace, epsilons: tuple[float, ...], processes: Processes) -> None:
    began = time.perf_counter()
    settings = (arguments.dtype, radii_setting(epsilons))
    target = processes.each(lambda: open_target(arguments, *settings))
    dtype = getattr(torch, arguments.dtype)
    # K is of weights in the arithmetic of the forward pass; for a fast look, in float32.
    measured = torch.float32 if dtype == torch.bfloat16 else dtype
    layers = shared_facts(target.model.to(processes.device, measured), processes)
    proof, radii = _radii_of(target.model.to(dtype), layers)
    arrays = map_test_set(target, "certify", [repr(proof)], partial(_work, radii), processes)
    if processes.rank:
        return
    out, results = target.out, SampleResults(**arrays)
    facts = certificate(target, proof, results, epsilons)
    with writing(out.path):
        write_samples(target, results)
        written = [out.samples, *write_report(target, facts, results)]
        # certificate.json is last: where it is, the others are too.
        for path in (out.certificate, *([arguments.json] if arguments.json else [])):
            write_json(path, facts)
            written.append(path)
    title = "certificate" if facts["certified"] else f"NO CERTIFICATE ({facts['why_not']})"
    print(f"{title} of {target.path} on {target.data}")
    print(table(facts))
    if out.path.parent.name == BESIDE:
        own = RunDirectory(out.path.parent.parent).certificate
        print(f"{own} is not changed; this one is beside it: {out.path}")
    if not results.radii.any():
        print("all radii are 0, nothing is proven: no margin is above the bound of its rounding")
    seconds = time.perf_counter() - began
    print(f"{seconds:.1f} s; written: " + ", ".join(str(path) for path in written))


def _radii_of(model: LipNeXt, layers: list[Facts]) -> tuple[Proof, Radii]:
    dtype = model.head.weight.dtype
    arithmetic = str(dtype).removeprefix("torch.")
    if dtype != torch.bfloat16:
        certifier = Certifier(model, layers)
        rounding = certifier.feature_rounding()
        return Proof(certifier.lipschitz_bound, arithmetic, rounding), certifier
    bound = network_bound(layers)
    return Proof(bound, arithmetic, why_not=FAST_LOOK), partial(_fast_look, model, bound)


@torch.no_grad()
def _fast_look(model: LipNeXt, bound: float, images: Tensor) -> tuple[Tensor, Tensor]:
    weight = model.head.weight
    labels, radii = nominal_radii(*model(to_unit_range(images, weight.device, weight.dtype), True))
    return labels, radii.double() / bound


def _work(radii: Radii, batch: TestBatch, _: object) -> Arrays:
    labels, found = radii(batch.images)
    return {
        "labels": batch.labels.numpy(),
        "predictions": labels.cpu().numpy(),
        "radii": found.cpu().numpy(),
    }


if __name__ == "__main__":
    main()
