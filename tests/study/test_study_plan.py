"""STUDY.yaml: rows, budgets, mistakes; and the shipped studies."""

import json
from pathlib import Path

import pytest

from lipnext_scale.studies.plan import load_tasks
from lipnext_scale.study import main

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(ROOT.glob("studies/**/*.yaml"))
PLAIN = {"config": "builtin:digits.yaml", "grid": {"optim.lr": ["1e-3", 0.01]}}


def tasks_of(directory: Path, study: dict, *overrides: str) -> list:
    path = directory / "study.yaml"
    path.write_text(json.dumps({"dir": str(directory / "runs"), **study}))
    return load_tasks(str(path), list(overrides))


def test_rows_are_a_product_and_every_seed_comes_after_all_rows(tmp_path):
    rows = {"abs": {}, "minmax": {"model": {"activation": "minmax"}}}
    study = {**PLAIN, "rows": rows, "seeds": [3, 5], "settings": {"loss.epsilon": "36/255"}}
    tasks = tasks_of(tmp_path, study)
    names = [f"{row}, lr={lr}" for row in rows for lr in ("1e-3", "0.01")]
    assert [task.row for task in tasks] == names * 2
    assert [task.seed for task in tasks] == [3] * 4 + [5] * 4
    assert tasks[-1].run.path == tmp_path / "runs" / "minmax,lr=0.01" / "seed_5"
    settings = ["loss.epsilon=36/255", "model.activation=minmax", "optim.lr=0.01"]
    own = ["optim.epochs=60", "optim.warmup_epochs=3", "run.seed=5"]
    assert tasks[-1].arguments() == [*settings, *own, f"run.dir={tasks[-1].run.path}"]


def test_a_budget_sets_the_epochs_and_the_warm_up_keeps_its_share(tmp_path):
    """digits.yaml: 3 of 60 epochs, of 22 steps."""

    def given(budget: dict) -> list[str]:
        task = tasks_of(tmp_path, {**PLAIN, "equal": budget})[0]
        task.directory.mkdir(parents=True, exist_ok=True)
        task.timing.write_text('{"seconds_per_epoch": 0.5}')
        return [a for a in task.arguments()[1:] if not a.startswith(("run.seed", "run.dir"))]

    assert given({"epochs": 20}) == ["optim.epochs=20", "optim.warmup_epochs=1"]
    assert given({"seconds": 5.1}) == ["optim.epochs=10", "optim.warmup_epochs=0.5"]
    steps = ["optim.epochs=10", "optim.warmup_epochs=0.5", "run.max_steps=200"]
    assert given({"steps": 200}) == steps


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": [1]}, "seed = [1]: unknown key; did you mean seeds?"),
        ({"attack": {"samples": -1}}, "attack.samples = -1: must be at least 0"),
        ({"equal": {"epoch": 3}}, "equal.epoch = 3: unknown key; did you mean equal.epochs?"),
        ({"equal": {"epochs": 3, "steps": 5}}, "must be positive, and the only key of equal"),
        ({"rows": {"a": {"model.widht": 8}}}, "a, lr=1e-3: model.widht = 8: unknown key; did you"),
        ({"grid": {"optim.lr": ["x"]}}, "lr=x: optim.lr = 'x': must be a number"),
        ({"grid": {"optim.lr": []}}, "has no rows"),
        ({"rows": {"a": 3}}, "rows.a = 3: must be a mapping"),
        ({"settings": {"run.seed": 3}}, "run.seed = 3: is made by the study's `seeds`"),
        ({"seeds": [1, 1]}, "seeds = [1, 1]: must be different numbers"),
        ({"config": "builtin:digit.yaml"}, "builtin:digit.yaml: no such file"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, change, said):
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps({"dir": str(tmp_path / "runs"), **PLAIN, **change}))
    with pytest.raises(SystemExit) as ended:
        main([str(path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert said in error and not (tmp_path / "runs").exists()


def test_a_task_that_is_not_there(tmp_path):
    tasks = tasks_of(tmp_path, PLAIN)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "study.yaml"), "--task", str(len(tasks))])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT / "studies")))
def test_a_shipped_study(path, monkeypatch):
    """Each row is a recipe of its own; the directory is named after the file."""
    monkeypatch.chdir(ROOT)
    tasks = load_tasks(str(path), [])
    assert len({tuple(task.settings) for task in tasks}) == len({task.row for task in tasks})
    assert tasks[0].study.dir == f"runs/{path.relative_to(ROOT).with_suffix('')}"
    if path.parent.name != "small":
        assert tasks[0].study.slurm and len(tasks[0].study.seeds) >= 1
