"""Attack a model on its test set, inside its certified radii and beyond them.

    python -m lipnext_scale.attack --run runs/digits [--radii 36/255 0.5] [--samples 1000]

Writes attack.json into the run directory and prints a table. A label that changes inside its radius
is written to violations.npz, and the command fails.
"""

import argparse
import math
from functools import partial

import torch

from lipnext_scale.attack.hunt import INSIDE, METHODS, Attacker, AttackSettings, hunt, robust_at
from lipnext_scale.attack.report import Facts, Report, violation_arrays
from lipnext_scale.certify import Certifier
from lipnext_scale.certify.certificate import parse_radii
from lipnext_scale.certify.radius import PROOF
from lipnext_scale.certify.target import (
    Arrays,
    EvaluationTarget,
    add_arguments,
    map_test_set,
    open_target,
    shared_blocks,
)
from lipnext_scale.config import as_float
from lipnext_scale.cpu import keep_freed_memory
from lipnext_scale.data import TestBatch
from lipnext_scale.errors import ArgumentParser, RunFailed, UserError, command
from lipnext_scale.parallel.processes import Processes


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    settings, epsilons = _settings(arguments), parse_radii(arguments.radii)
    inside = _number(arguments.inside, "--inside", 1.0)
    assumed = arguments.assume_lipschitz
    lipschitz = None if assumed is None else _number(assumed, "--assume-lipschitz", math.inf)
    keep_freed_memory()
    processes = Processes(arguments.device, alone=True)
    try:
        target = processes.each(lambda: open_target(arguments))
        samples = _evenly_spaced(arguments.samples, len(target.test.catalog))
        model = target.model.to(processes.device, torch.float64)
        certifier = Certifier(model, shared_blocks(model, processes), lipschitz)
        facts = _facts(target, certifier, settings, inside, epsilons)
        if certifier.assumed and processes.rank == 0:
            print(_no_certificate(certifier.lipschitz_bound), flush=True)
        results = map_test_set(
            target.test,
            target.out,
            [PROOF, *target.identity(), repr(facts)],
            partial(_attack_batch, Attacker(certifier, settings), inside, epsilons),
            processes,
            "attack",
            samples,
        )
        processes.on_rank0(lambda: _tell(target, facts, results))
    finally:
        processes.close()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lipnext_scale.attack", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    whole = partial(parser.add_argument, type=int, metavar="N")
    parser.add_argument("--radii", nargs="+", help="radii to attack at, such as 36/255 0.5")
    whole("--samples", help="attack this many, evenly spaced (default: all)")
    whole("--steps", default=100, help="of each attack (default 100; 20 are a quick look)")
    whole("--restarts", default=5, help="of each method (default 5; 2 are a quick look)")
    parser.add_argument(
        "--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="default: all"
    )
    parser.add_argument(
        "--inside", default=str(INSIDE), help=f"share of the radius to attack at (default {INSIDE})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the points to begin at (default 0)")
    parser.add_argument(
        "--assume-lipschitz",
        metavar="K",
        help="take K for the Lipschitz bound: an experiment, no certificate",
    )
    return parser


def _settings(arguments: argparse.Namespace) -> AttackSettings:
    for name in ("steps", "restarts"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} {getattr(arguments, name)}: must be at least 1")
    methods = tuple(dict.fromkeys(arguments.methods))
    return AttackSettings(methods, arguments.restarts, arguments.steps, arguments.seed)


def _number(text: str, name: str, most: float) -> float:
    number = as_float(text)
    if number is None or not 0 < number <= most:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise UserError(f"{name} {text}: must be a number above 0{limit}")
    return number


def _evenly_spaced(count: int | None, total: int) -> torch.Tensor:
    if count is None:
        count = total
    if not 1 <= count <= total:
        raise UserError(f"--samples {count}: must be 1 to {total}, all samples of the set")
    return torch.arange(count) * total // count


def _facts(
    target: EvaluationTarget,
    certifier: Certifier,
    settings: AttackSettings,
    inside: float,
    epsilons: tuple[float, ...],
) -> Facts:
    return Facts(
        settings=settings,
        inside=inside,
        epsilons=epsilons,
        lipschitz_bound=certifier.lipschitz_bound,
        lipschitz_assumed=certifier.assumed,
        arithmetic=str(certifier.dtype).removeprefix("torch."),
        weights=target.weights,
        fingerprint=target.test.catalog.fingerprint(),
        resize=target.test.resize,
    )


def _attack_batch(
    attacker: Attacker, inside: float, epsilons: tuple[float, ...], batch: TestBatch
) -> Arrays:
    """Of every sample of the batch what came out, and the violations among them."""
    targets = attacker.targets(batch.images, batch.ids)
    found = hunt(attacker, targets, inside)
    hunted = (targets.radii > 0) * len(attacker.settings.attacks)

    (right,) = (targets.labels == batch.labels.to(attacker.device)).nonzero(as_tuple=True)
    robust = torch.zeros(len(targets), len(epsilons), dtype=torch.bool)
    attacks = torch.zeros(len(targets), len(epsilons), dtype=torch.int64)
    outcome = robust_at(attacker, targets.only(right), epsilons)
    robust[right.cpu()], attacks[right.cpu()] = outcome.robust.mT.cpu(), outcome.attacks.mT.cpu()

    shape = tuple(batch.images.shape[1:])
    violations = violation_arrays([*found, *outcome.violations], shape)
    return {
        "labels": batch.labels.numpy(),
        "predictions": targets.labels.cpu().numpy(),
        "radii": targets.radii.cpu().numpy(),
        "hunt_attacks": hunted.cpu().numpy(),
        "robust": robust.numpy(),
        "robust_attacks": attacks.numpy(),
        **{f"violation_{name}": array for name, array in violations.items()},
    }


def _tell(target: EvaluationTarget, facts: Facts, results: Arrays) -> None:
    """Write and print; a violation is a failure once all is written."""
    report = Report(facts, results, target.test.catalog)
    written = report.write(target.out)
    print(f"attack of {target.path} on {target.data}")
    print(report.table())
    print("written: " + ", ".join(str(path) for path in written), flush=True)
    assumed = _no_certificate(facts.lipschitz_bound) if facts.lipschitz_assumed else ""
    if assumed:
        print(assumed, flush=True)
    verdict = report.verdict()
    if verdict is not None:
        reason = f"; K = {facts.lipschitz_bound:g} was assumed" if assumed else ""
        raise RunFailed(f"{verdict}{reason}")


def _no_certificate(bound: float) -> str:
    return f"NO CERTIFICATE: K = {bound:g} is assumed, not proven; all radii here are an experiment"


if __name__ == "__main__":
    main()
