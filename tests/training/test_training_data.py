"""Runs on sharded data: workers, damaged shards, bad samples, processes that die."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gloo import run_processes
from sets_making import write_set
from shared_memory import mapped_names
from small import assert_same, final_state
from torch.utils.data import Dataset

from lipnext_scale.config.recipe import Recipe, load_recipe
from lipnext_scale.data import catalog
from lipnext_scale.data.loader import made_by_workers
from lipnext_scale.observe.metrics import read_records
from lipnext_scale.training.trainer import Trainer
from lipnext_scale.utils.errors import RunFailed, UserError
from lipnext_scale.utils.files import file_sha256

SETTINGS = """
data.batch_size=12 data.augment.crop_padding=1 data.augment.rand_augment=0.5
data.synthetic.per_real=3 model.depth=2 model.width=16 model.image_size=8 model.patch_size=2
model.num_classes=7 optim.epochs=3 optim.warmup_epochs=1 run.summary=false run.eval_every=1
run.log_every=1 run.checkpoint_every=5
""".split()


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("sets")
    return [
        f"data.train={write_set(directory, [1, 3, 0, 2, 1, 4, 0, 1, 2, 3, 1, 2, 1])}",
        f"data.test={write_set(directory, [4, 7], 'test')}",
        f"data.synthetic.shards={write_set(directory, [30, 20], 'edm')}",
    ]


def recipe(sets: list[str], run: Path, *overrides: str) -> Recipe:
    return load_recipe(None, [*SETTINGS, *sets, f"run.dir={run}", *overrides])


def values(run: Path) -> list[dict]:
    return read_records(run / "metrics.jsonl")


# --- exact, with any number of workers ---------------------------------------------------------


def test_workers_change_nothing_and_a_stop_neither(sets, tmp_path):
    """With two workers, stopped in the middle and continued without any: the same to the bit."""
    Trainer(recipe(sets, tmp_path / "straight")).run()
    Trainer(recipe(sets, tmp_path / "stopped", "data.workers=2", "run.max_steps=9")).run()
    Trainer(recipe(sets, tmp_path / "stopped")).run()
    assert_same(final_state(tmp_path / "stopped"), final_state(tmp_path / "straight"))
    scores = [record for record in values(tmp_path / "straight") if "data/wait_share" in record]
    assert len(scores) == 21 and all(0 <= s["data/wait_share"] <= 1 for s in scores)


# --- before training --------------------------------------------------------------------------


def test_a_flipped_bit_is_found_before_training(tmp_path):
    """The shard is named, and nothing has been written. It can be overruled."""
    directory = tmp_path / "data"
    own = [
        f"data.train={write_set(directory, [5, 9])}",
        f"data.test={write_set(directory, [4, 7], 'test')}",
        f"data.synthetic.shards={write_set(directory, [30], 'edm')}",
    ]
    shard = directory / "edm-000000.tar"
    content = bytearray(shard.read_bytes())
    content[len(content) - 600] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="edm-000000.tar: its sha256 is not that of its index"):
        Trainer(recipe(own, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    Trainer(recipe(own, tmp_path / "run", "data.verify=false", "run.max_steps=1"))


def test_shards_are_not_hashed_again(sets, tmp_path, monkeypatch):
    """A continued run reads its notes: only what changed on disk since is looked at."""
    hashed: list[str] = []

    def noted(path: str, *arguments) -> str:
        hashed.append(Path(path).name)
        return file_sha256(path, *arguments)

    monkeypatch.setattr(catalog, "file_sha256", noted)
    Trainer(recipe(sets, tmp_path / "run", "run.max_steps=1")).run()
    notes = (tmp_path / "run" / "checked_shards.txt").read_text().splitlines()
    assert len(hashed) == len(notes) == 13 + 2 + 2 + 3  # shards, indexes
    hashed.clear()
    Trainer(recipe(sets, tmp_path / "run", "run.max_steps=2")).run()
    assert (tmp_path / "run" / "checked_shards.txt").read_text().splitlines() == notes
    assert hashed == []
    os.utime(Path(sets[0].partition("=")[2]).parent / "train-000003.tar")
    Trainer(recipe(sets, tmp_path / "run", "run.max_steps=3")).run()
    assert hashed == ["train-000003.tar"]


# --- bad samples ------------------------------------------------------------------------------


def break_samples(shard: Path, samples: list[int]) -> None:
    content = bytearray(shard.read_bytes())
    for sample in samples:
        place = content.index(b"IDAT", content.index(f"{sample:06d}.png".encode()))
        content[place + 9] ^= 1
    shard.write_bytes(content)


@pytest.fixture
def broken(tmp_path: Path, sets: list[str]) -> list[str]:
    """A training set with one image that cannot be decoded."""
    pattern = write_set(tmp_path / "broken", [30], index=False)
    break_samples(tmp_path / "broken" / "train-000000.tar", [7])
    return [f"data.train={pattern}", *sets[1:]]


def test_a_run_goes_on_without_a_bad_sample(broken, tmp_path, capsys):
    """Named once in three epochs, counted in the metrics; the number of steps is unchanged."""
    Trainer(recipe(broken, tmp_path / "run", "data.on_bad_sample=substitute")).run()
    said = capsys.readouterr().out
    assert said.count("sample 000007 is a damaged PNG") == 1
    logged = [record for record in values(tmp_path / "run") if "train/loss" in record]
    assert len(logged) == 30 and logged[-1]["data/bad_samples"] == 1


def go_on_in_parts(rank: int, world: int, sets: list[str], run: Path) -> None:
    """Bad samples of eight steps and more at once, in two starts of the run."""
    for steps in (8, 16):
        Trainer(recipe(sets, run, "run.log_every=8", f"run.max_steps={steps}")).run()


@pytest.mark.slow
def test_every_bad_sample_of_any_rank_is_named(broken, tmp_path):
    """13 of 30, more than are printed at once, on two ranks, in a run that is started twice."""
    bad = [*range(0, 24, 2), 7]
    break_samples(tmp_path / "broken" / "train-000000.tar", bad[:-1])
    settings = [*broken, "data.on_bad_sample=substitute"]
    run_processes(2, go_on_in_parts, settings, tmp_path / "run")
    lines = (tmp_path / "run" / "bad_samples.txt").read_text().splitlines()
    assert len(lines) == len(bad)
    for sample in bad:
        assert sum(f"sample {sample:06d} is a damaged PNG" in line for line in lines) == 1


# --- files that fail --------------------------------------------------------------------------


class Failing(Dataset):
    def __getitem__(self, _: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/shards/train-000007.tar")


def test_a_workers_error_names_the_file(sets, tmp_path):
    """torch makes it anew without number and name: they are in the text alone."""
    trainer = Trainer(recipe(sets, tmp_path / "run"))
    trainer.train_step = lambda _: next(made_by_workers(Failing(), [0], workers=1))
    with pytest.raises(RunFailed) as failed:
        trainer.run()
    assert str(failed.value) == (
        "step 0: OSError: [Errno 5] Input/output error: '/shards/train-000007.tar'; "
        f"the same command continues {tmp_path}/run"
    )


# --- processes that die -----------------------------------------------------------------------


def start_command(sets: list[str], run: Path, *overrides: str) -> subprocess.Popen:
    settings = [*SETTINGS, *sets, f"run.dir={run}", "data.workers=2", "optim.epochs=4000"]
    command = [sys.executable, "-m", "lipnext_scale.train", *settings, "run.eval_every=0"]
    process = subprocess.Popen(
        [*command, "run.checkpoint_every=0", *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    while not values(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def workers_of(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its run"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_quickly(sets, tmp_path):
    """One line that says what ended and how to go on, exit code 1, no process left."""
    process = start_command(sets, tmp_path / "run")
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 1
    assert "a process that makes batches (data.workers) has ended" in error
    assert "Traceback" not in error and error.count("\n") == 1
    assert_gone(workers)


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGUSR1, 0)])
def test_a_signal_to_all_saves_and_leaves_nothing_behind(sets, tmp_path, number, code):
    """The process group gets it, as Ctrl-C of a terminal or Slurm's warning: saved, no worker, no
    memory left."""
    process = start_command(sets, tmp_path / "run")
    workers = workers_of(process)
    names = set().union(*map(mapped_names, (process.pid, *workers)))
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code and error.count("\n") == 1, error
    assert f"{number.name} at step " in error and ": saved; the same command continues" in error
    assert (tmp_path / "run" / "requeue").exists() == (number == signal.SIGUSR1)
    assert_gone(workers)
    assert not [name for name in names if Path(name).exists()]
    assert final_state(tmp_path / "run")["step"] > 0


@pytest.mark.slow
def test_workers_of_a_killed_run_end_with_it(sets, tmp_path):
    """kill -9 of the run itself: its workers, which get no signal, end at once."""
    process = start_command(sets, tmp_path / "run")
    workers = workers_of(process)
    process.kill()
    process.communicate()
    assert len(workers) == 2
    assert_gone(workers)
