"""Certify a model on a test set, and write a report of it.

    python -m lipnext_scale.certify --run runs/digits
    python -m lipnext_scale.certify --model digits.safetensors --data 'builtin:digits/test-*.tar.gz'
    torchrun --nproc-per-node 8 -m lipnext_scale.certify --model runs/imagenet_2b

Writes certificate.json, samples.csv, report.html, cra.png and examples.png into the run directory
(or --out), and prints a table. Started again after a kill it goes on where it was.
"""

import json
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipnext_scale.attack.hunt import AttackExample, nearest_change, search_copy
from lipnext_scale.certify.bounds import BlockFacts, network_bound
from lipnext_scale.certify.certificate import (
    Proof,
    SampleResults,
    certificate,
    parse_radii,
    table,
    write_json,
    write_samples,
)
from lipnext_scale.certify.certifier import Certifier
from lipnext_scale.certify.paper import comparison_text
from lipnext_scale.certify.radius import PROOF, nominal_radii
from lipnext_scale.certify.report import ReportInputs, draw_curve, draw_examples, write_report
from lipnext_scale.certify.target import (
    Arrays,
    EvaluationTarget,
    add_arguments,
    map_test_set,
    open_target,
    shared_blocks,
)
from lipnext_scale.cpu import keep_freed_memory
from lipnext_scale.data import TestBatch
from lipnext_scale.errors import ArgumentParser, UserError, command
from lipnext_scale.models import LipNeXt
from lipnext_scale.parallel.processes import Processes
from lipnext_scale.run_directory import RunDirectory

PICTURED_ATTACKS = (0.1, 0.4, 0.6, 0.9)  # where in the order of radii
FAST_LOOK = "a fast look in bfloat16, whose rounding is not bounded"
Radii = Callable[[Tensor], tuple[Tensor, Tensor]]  # uint8 images → (labels, radii)


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    epsilons = parse_radii(arguments.radii)
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
        "--radii", nargs="+", help="radii to report (default 36/255 72/255 108/255 0.5 1)"
    )
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
    target = processes.each(lambda: open_target(arguments))
    dtype = getattr(torch, arguments.dtype)
    blocks = shared_blocks(target.model.to(processes.device, _measured(dtype)), processes)
    proof, radii = _radii_of(target.model.to(dtype), blocks)
    # All that a radius depends on: chunks of an older proof must not be taken up by a newer one.
    what = ["certify", PROOF, arguments.dtype, repr(proof), *target.identity()]
    work = partial(_work, radii)
    arrays = map_test_set(target.test, target.out, what, work, processes, title="certify")
    if processes.rank:
        return
    results = SampleResults(**arrays)
    facts = certificate(target, proof, results, epsilons)
    examples = _attack_examples(target, radii, results) if isinstance(radii, Certifier) else []
    written = _write(target, facts, results, examples, arguments.json)
    print(f"{_title(facts)} of {target.path} on {target.data}")
    print(table(facts))
    print(comparison_text(facts), end="")
    seconds = time.perf_counter() - began
    print(f"{seconds:.1f} s; written: " + ", ".join(str(path) for path in written))


def _title(facts: dict[str, Any]) -> str:
    return "certificate" if facts["certified"] else f"NO CERTIFICATE ({facts['why_not']})"


def _measured(dtype: torch.dtype) -> torch.dtype:
    """K speaks of weights in the arithmetic of the forward pass; of a fast look, of float32."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _radii_of(model: LipNeXt, blocks: dict[int, BlockFacts]) -> tuple[Proof, Radii]:
    arithmetic = str(model.head.weight.dtype).removeprefix("torch.")
    if model.head.weight.dtype != torch.bfloat16:
        certifier = Certifier(model, blocks)
        rounding = certifier.feature_rounding()
        return Proof(certifier.lipschitz_bound, arithmetic, rounding), certifier
    bound = network_bound(blocks[number] for number in sorted(blocks))
    return Proof(bound, arithmetic, why_not=FAST_LOOK), partial(_fast_look, model, bound)


@torch.no_grad()
def _fast_look(model: LipNeXt, bound: float, images: Tensor) -> tuple[Tensor, Tensor]:
    weight = model.head.weight
    labels, radii = nominal_radii(*model(images.to(weight.device, weight.dtype) / 255, True))
    return labels, radii.double() / bound


def _work(radii: Radii, batch: TestBatch) -> Arrays:
    labels, found = radii(batch.images)
    return {
        "labels": batch.labels.numpy(),
        "predictions": labels.cpu().numpy(),
        "radii": found.cpu().numpy(),
    }


def _write(
    target: EvaluationTarget,
    facts: dict[str, Any],
    results: SampleResults,
    examples: list[AttackExample],
    json_copy: Path | None,
) -> list[Path]:
    """All files; the certificate is last, so that where it is the others are too."""
    out = RunDirectory(target.out)
    inputs = ReportInputs(
        facts=facts,
        results=results,
        image=target.test.image,
        name=target.test.sample_name,
        attacks=examples,
        attack=_attack_of(out.attack, facts),
    )
    outputs: dict[Path, Callable[[Path], None]] = {
        out.samples: lambda path: write_samples(path, results, target.test.sample_name),
        out.curve_picture: lambda path: draw_curve(path, facts, results),
        out.examples_picture: lambda path: draw_examples(path, results, target.test.image),
        out.report: lambda path: write_report(path, inputs),
        out.certificate: lambda path: write_json(path, facts),
    }
    if json_copy is not None:
        outputs[json_copy] = outputs[out.certificate]
    for path, write in outputs.items():
        try:
            write(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return list(outputs)


def _attack_of(path: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """What lipnext_scale.attack found, if it was about these weights, samples and this bound."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    here = (facts["model"]["weights"], facts["data"]["fingerprint"], facts["data"]["resize"], False)
    keys = ("weights", "fingerprint", "resize", "lipschitz_assumed")
    return found if tuple(found.get(key) for key in keys) == here else None


def _attack_examples(
    target: EvaluationTarget, certifier: Certifier, results: SampleResults
) -> list[AttackExample]:
    """Of some right predictions, from small to large radii, the nearest change that is found."""
    (right,) = (results.correct & (results.radii > 0)).nonzero()
    ordered = right[results.radii[right].argsort(kind="stable")].tolist()
    places = {int(len(ordered) * share) for share in PICTURED_ATTACKS} if ordered else set()
    search = search_copy(certifier.model)
    found = []
    for sample in [ordered[place] for place in sorted(places)]:
        image = torch.from_numpy(target.test.image(sample)).permute(2, 0, 1)
        label, radius = int(results.predictions[sample]), float(results.radii[sample])
        example = nearest_change(certifier, image, label, radius, sample, search=search)
        found += [example] if example is not None else []
    return found


if __name__ == "__main__":
    main()
