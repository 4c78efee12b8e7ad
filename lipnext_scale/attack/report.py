"""What an attack of a whole set found: attack.json, violations.npz, and a table."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lipnext_scale.attack.hunt import AttackSettings, Points
from lipnext_scale.certify.certificate import SampleResults, radius_name, wilson_interval
from lipnext_scale.certify.target import Arrays
from lipnext_scale.data import Catalog
from lipnext_scale.data.source import SampleStore
from lipnext_scale.errors import UserError
from lipnext_scale.files import atomic_file, write_atomically

ATTACK, VIOLATIONS = "attack.json", "violations.npz"
# Of each violation, in violations.npz and in the arrays of a chunk.
KEPT = ("samples", "images", "attacked", "labels", "predictions", "radii", "distances")
_IMAGES = ("images", "attacked")


def violation_arrays(found: list[Points], image_shape: tuple[int, ...]) -> Arrays:
    """Of each sample its first violation, by sample number; labels: those before the attack."""
    if not found:
        return _no_violations(image_shape)
    columns = [
        [p.targets.ids for p in found],
        [p.targets.images for p in found],
        [p.attacked for p in found],
        [p.targets.labels for p in found],
        [p.labels for p in found],
        [p.targets.radii for p in found],
        [p.distances for p in found],
    ]
    joined = {
        name: torch.cat(parts).cpu().numpy() for name, parts in zip(KEPT, columns, strict=True)
    }
    _, first = np.unique(joined["samples"], return_index=True)
    return {name: array[first] for name, array in joined.items()}


def _no_violations(image_shape: tuple[int, ...]) -> Arrays:
    whole, real, images = np.zeros(0, np.int64), np.zeros(0), np.zeros((0, *image_shape))
    return dict(zip(KEPT, (whole, images, images, whole, whole, real, real), strict=True))


@dataclass(frozen=True)
class Facts:
    """What a report says of its subject beside what was found."""

    settings: AttackSettings
    inside: float
    epsilons: tuple[float, ...]
    lipschitz_bound: float
    lipschitz_assumed: bool
    arithmetic: str
    weights: str
    fingerprint: str
    resize: int


class Report:
    """results: of `map_test_set`, with the arrays that `__main__.py` makes of each chunk."""

    def __init__(self, facts: Facts, results: Arrays, catalog: Catalog) -> None:
        self.facts = facts
        self._samples = SampleResults(results["labels"], results["predictions"], results["radii"])
        self._robust, self._tried = results["robust"], results["robust_attacks"]
        self._hunts = results["hunt_attacks"]
        self.violations = {name: results[f"violation_{name}"] for name in KEPT}
        store = SampleStore(catalog)
        self._names = [store.name(int(sample)) for sample in self.violations["samples"]]
        store.close()

    def as_dict(self) -> dict[str, Any]:
        facts, samples = self.facts, self._samples
        return {
            "clean_accuracy": samples.share(),
            "radii": {repr(radius): self._at(row) for row, radius in enumerate(facts.epsilons)},
            "violations": [self._violation(number) for number in range(len(self._names))],
            "attacked": len(samples),
            "attacks": int(self._hunts.sum() + self._tried.sum()),
            "attacks_inside_the_radius": int(self._hunts.sum()),
            "inside": facts.inside,
            **asdict(facts.settings),
            "lipschitz_bound": facts.lipschitz_bound,
            "lipschitz_assumed": facts.lipschitz_assumed,
            "arithmetic": facts.arithmetic,
            "weights": facts.weights,
            "fingerprint": facts.fingerprint,
            "resize": facts.resize,
        }

    def _at(self, row: int) -> dict[str, Any]:
        robust, total = int(self._robust[:, row].sum()), len(self._samples)
        return {
            "certified": self._samples.share(self.facts.epsilons[row]),
            "robust": robust / total,
            "interval": list(wilson_interval(robust, total)),
            "attacked": int((self._tried[:, row] > 0).sum()),
            "attacks": int(self._tried[:, row].sum()),
        }

    def _violation(self, number: int) -> dict[str, Any]:
        one = {name: self.violations[name][number].item() for name in KEPT if name not in _IMAGES}
        return {
            "sample": one["samples"],
            "name": self._names[number],
            "radius": one["radii"],
            "distance": one["distances"],
            "label_before": one["labels"],
            "label_after": one["predictions"],
        }

    def write(self, out: Path) -> list[Path]:
        """What was written; violations.npz of an earlier attack does not stay beside this one."""
        violations, attack = out / VIOLATIONS, out / ATTACK
        try:
            if self._names:
                with atomic_file(violations) as file:
                    np.savez(file, **self.violations)  # type: ignore[arg-type]
            else:
                violations.unlink(missing_ok=True)
            write_atomically(attack, (json.dumps(self.as_dict(), indent=2) + "\n").encode())
        except OSError as error:
            raise UserError(f"{out}: cannot be written: {error.strerror}") from None
        return [attack, violations] if self._names else [attack]

    def table(self) -> str:
        facts, samples = self.facts, self._samples
        lines = [f"  {'':16}{'certified':>11}{'under attack':>14}   95 % interval"]
        clean = samples.share()
        lines.append(f"  {'clean':16}{clean:>11.2%}{clean:>14.2%}")
        for row, epsilon in enumerate(facts.epsilons):
            found = self._at(row)
            low, high = found["interval"]
            lines.append(
                f"  {'ε = ' + radius_name(epsilon):16}{found['certified']:>11.2%}"
                f"{found['robust']:>14.2%}   {low:.2%} to {high:.2%}"
            )
        hunted = int(self._hunts.sum())
        lines += [
            f"  {len(samples):,} samples, {hunted:,} attacks at {facts.inside:g} of the radius; "
            f"samples that change inside it: {len(self._names)}",
            f"  {' and '.join(facts.settings.methods)}, {facts.settings.restarts} restarts of "
            f"{facts.settings.steps} steps; K = {facts.lipschitz_bound:.9f}"
            f"{' (assumed)' if facts.lipschitz_assumed else ''}, {facts.arithmetic}",
        ]
        return "\n".join(lines)

    def verdict(self) -> str | None:
        """What is wrong with the certificate, in a line; None if nothing was found."""
        if not self._names:
            return None
        first = self._violation(0)
        return (
            f"samples that change inside their radius: {len(self._names)}; {first['name']}: "
            f"radius {first['radius']:.9g}, label {first['label_before']} becomes "
            f"{first['label_after']} at {first['distance']:.9g}"
        )
