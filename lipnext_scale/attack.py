"""Attack a model on its test set, inside its certified radii and beyond them.

    python -m lipnext_scale.attack --run runs/digits [--radii 36/255 0.5] [--samples 1000]

Writes attack.json and attacked.npz into the run directory, adds them to the report of `certify`
that is there, and prints a table. A label that changes inside its radius is written to
violations.npz, and the command fails.
"""

import lipnext_scale.utils.passive  # noqa: F401

import math
from argparse import ArgumentTypeError
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from lipnext_scale import attacks
from lipnext_scale.attacks import INSIDE, KEPT, METHODS, Attacker, AttackSettings
from lipnext_scale.certification import Certifier
from lipnext_scale.certification.certificate import (
    Arrays,
    EvaluationTarget,
    add_arguments,
    class_name,
    map_test_set,
    open_target,
    shared_facts,
    write_arrays,
    write_json,
    writing,
)
from lipnext_scale.certification.report import ATTACKED, refresh_report
from lipnext_scale.distributed.processes import Processes
from lipnext_scale.utils.config import as_float
from lipnext_scale.utils.cpu import keep_freed_memory
from lipnext_scale.utils.errors import ArgumentParser, RunFailed, UserError, command, positive


@command
def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    methods = tuple(dict.fromkeys(arguments.methods))
    settings = AttackSettings(methods, arguments.restarts, arguments.steps, arguments.seed)
    epsilons, inside = tuple(sorted(set(arguments.radii))), arguments.inside
    keep_freed_memory()
    processes = Processes(arguments.device, alone=True)
    try:
        target = processes.each(lambda: open_target(arguments))
        samples = _evenly_spaced(arguments.samples, len(target.test.catalog))
        if processes.rank == 0:
            print(f"attack of {target.path} on {target.data}: {len(samples):,} samples", flush=True)
        model = target.model.to(processes.device, torch.float64)
        certifier = Certifier(model, shared_facts(model, processes), arguments.assume_lipschitz)
        about = _about(target, certifier, settings, inside)
        if certifier.assumed and processes.rank == 0:
            assumption = f"K = {certifier.lipschitz_bound:g} is assumed, not proven"
            print(f"NO CERTIFICATE: {assumption}; all radii here are an experiment", flush=True)
        work = partial(attacks.attack_batch, Attacker(certifier, settings), inside, epsilons)
        what = [repr(about), repr(epsilons)]
        results = map_test_set(target, "attack", what, work, processes, samples)
        processes.on_rank0(lambda: _report(target, certifier, results, epsilons, about))
    finally:
        processes.close()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lipnext_scale.attack", description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    number = partial(parser.add_argument, type=positive, metavar="N")
    number("--samples", help="attack this many, evenly spaced (default: all)")
    number("--steps", default=100, help="of each attack (default 100; 20 are a quick look)")
    number("--restarts", default=5, help="of each method (default 5; 2 are a quick look)")
    parser.add_argument(
        "--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="default: all"
    )
    share = partial(_number, most=1.0)
    how = f"share of the radius to attack at (default {INSIDE})"
    parser.add_argument("--inside", type=share, default=INSIDE, help=how)
    number("--seed", type=int, default=0, help="of the points to start at (default 0)")
    parser.add_argument(
        "--assume-lipschitz",
        metavar="K",
        type=_number,
        help="take K for the Lipschitz bound: an experiment, no certificate",
    )
    return parser


def _number(text: str, most: float = math.inf) -> float:
    number = as_float(text)
    if number is None or not 0 < number <= most:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise ArgumentTypeError(f"{text} must be a number above 0{limit}")
    return number


def _evenly_spaced(count: int | None, total: int) -> torch.Tensor:
    count = count or total
    if count > total:
        raise UserError(f"--samples {count}: must be 1 to {total}, all samples of the set")
    return torch.arange(count) * total // count


def _about(
    target: EvaluationTarget, certifier: Certifier, settings: AttackSettings, inside: float
) -> dict[str, Any]:
    """The part of attack.json that names the attack and its target."""
    return {
        "inside": inside,
        **asdict(settings),
        "lipschitz_bound": certifier.lipschitz_bound,
        "lipschitz_assumed": certifier.assumed,
        "arithmetic": str(certifier.dtype).removeprefix("torch."),
        "weights": target.weights,
        "fingerprint": target.test.catalog.fingerprint(),
        "resize": target.test.resize,
    }


def _report(
    target: EvaluationTarget,
    certifier: Certifier,
    results: Arrays,
    epsilons: tuple[float, ...],
    about: dict[str, Any],
) -> None:
    """Write and print; a violation is a failure once all is written."""
    out, test = target.out, target.test
    found = attacks.attack_json(results, epsilons, about, test.sample_name)
    violations, attacked = out.path / "violations.npz", out.path / ATTACKED
    with writing(out.path):
        # No file of an earlier attack stays beside attack.json, which is first: pictures take long.
        for path in (violations, attacked):
            path.unlink(missing_ok=True)
        write_json(out.attack, found)
        written = [out.attack]
        if found["violations"]:
            write_arrays(violations, {name: results[f"violation_{name}"] for name in KEPT})
            written.append(violations)
        if not certifier.assumed:  # else its radii are no certificate to show examples of
            attacker = Attacker(certifier, AttackSettings(("apgd",), restarts=1))
            if pictures := attacks.examples(attacker, results, test.image):
                write_arrays(attacked, pictures)
                written.append(attacked)
            written += refresh_report(target)
    print(attacks.attack_table(found))
    print("written: " + ", ".join(str(path) for path in written), flush=True)
    if found["violations"]:
        first = found["violations"][0]
        labels = (first["label_before"], first["label_after"])
        before, after = (class_name(target.classes, label) for label in labels)
        assumed = f"; K = {certifier.lipschitz_bound:g} was assumed" if certifier.assumed else ""
        raise RunFailed(
            f"samples that change inside their radius: {len(found['violations'])}; "
            f"{first['name']}: radius {first['radius']:.9g}, label {before} becomes {after} at "
            f"{first['distance']:.9g}{assumed}"
        )


if __name__ == "__main__":
    main()
