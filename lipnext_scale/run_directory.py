"""The layout of a run directory; the one place that knows its file names."""

from pathlib import Path

from lipnext_scale import config as configuration
from lipnext_scale.config import ConfigError
from lipnext_scale.errors import UserError
from lipnext_scale.faults.run_lock import RunLock
from lipnext_scale.files import write_atomically
from lipnext_scale.recipe import CHANGEABLE, Recipe, load_recipe


class RunDirectory:
    """config.yaml, metrics.jsonl, tensorboard/, checkpoints/, and what certification adds."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.summary = self.path / "summary.png"
        self.profile = self.path / "profile"
        self.checked_shards = self.path / "checked_shards.txt"
        self.bad_samples = self.path / "bad_samples.txt"
        # There after SIGUSR1 has stopped the run, and until it goes on.
        self.requeue = self.path / "requeue"
        self.hangs = self.path / "hangs"
        self.lock = RunLock(self.path)
        self.certificate = self.path / "certificate.json"
        self.samples = self.path / "samples.csv"
        self.report = self.path / "report.html"
        self.attack = self.path / "attack.json"
        self.curve_picture = self.path / "cra.png"
        self.examples_picture = self.path / "examples.png"

    def require_free_or_same(self, recipe: Recipe) -> None:
        """Nothing is here yet, or this run is and no other process goes on with it."""
        try:
            if self.config.exists():
                self._check_same_run(recipe)
            self.lock.require_free()
        except OSError as error:
            raise self._not_writable(error) from None

    def open_for(self, recipe: Recipe, checked_shards: list[str]) -> None:
        """Make the directory ours; write the resolved configuration and what was checked."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.lock.take()
            write_atomically(self.config, configuration.dump(recipe).encode())
            self.requeue.unlink(missing_ok=True)
            if checked_shards:
                write_atomically(self.checked_shards, "\n".join(checked_shards).encode())
        except OSError as error:
            raise self._not_writable(error) from None

    def whole_files(self) -> frozenset[str]:
        """Stamps of shards and indexes that earlier starts of the run found whole."""
        try:
            return frozenset(self.checked_shards.read_text("utf-8").splitlines())
        except (OSError, ValueError):  # there is none, or it is damaged: all are looked at
            return frozenset()

    def ask_for_requeue(self, reason: str) -> None:
        """For whoever started the run, who cannot tell it from a finished one by its exit code."""
        try:
            try:
                write_atomically(self.requeue, f"{reason}\n".encode())
            except OSError:  # a full disk mostly has room for a name, which is enough
                self.requeue.touch()
        except OSError as error:
            raise UserError(
                f"{reason}, but no requeue can be asked for: {self.requeue}: {error.strerror}"
            ) from None

    def _not_writable(self, error: OSError) -> UserError:
        return UserError(f"run.dir = {str(self.path)!r}: cannot be written: {error.strerror}")

    def _check_same_run(self, recipe: Recipe) -> None:
        there = self.recipe()
        changed = {
            key: values
            for key, values in configuration.differences(there, recipe).items()
            if key not in CHANGEABLE
        }
        if changed:
            key, (old, new) = next(iter(changed.items()))
            raise UserError(
                f"run.dir = {str(self.path)!r}: holds a run with another configuration "
                f"({key} = {old!r} there, {new!r} here); choose another run.dir or remove it"
            )

    def recipe(self) -> Recipe:
        """The configuration of the run that is here."""
        if not self.path.exists():
            raise UserError(f"{self.path}: no such run directory")
        if not self.config.is_file():
            raise UserError(f"{self.path}: is not a run directory (it has no {self.config.name})")
        try:
            return load_recipe(str(self.config))
        except ConfigError as error:
            raise UserError(f"{self.config}: {error}") from None
