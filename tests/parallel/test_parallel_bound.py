"""K of a sharded model: each rank bounds the matrices it owns, and only numbers are exchanged."""

from pathlib import Path

import pytest
import torch
from count_runs import small_trainer
from gloo import run_processes

from lipnext_scale.certify import lipschitz_bound
from lipnext_scale.certify.bounds import bound_of_norms, owned_norms
from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.parallel.pieces import training_pieces


def test_the_norms_of_the_matrices_give_the_networks_bound() -> None:
    """In one process: with W = M·Rᵀ at most by R's own deviation above the product's bound."""
    for form in ("product", "merged"):
        model = LipNeXt(LipNeXtConfig(3, 16, 8, 2, 1, 10, parametrisation=form), seed=0)
        with torch.no_grad():
            model.groups[0].bank[3] *= 1.05
        bound = bound_of_norms(owned_norms(training_pieces(model, None)))
        assert lipschitz_bound(model) * (1 - 1e-6) <= bound <= 1.05 * (1 + 1e-3)
        assert bound >= 1.05


def norms_of(rank: int, world: int, directory: Path, layout: str) -> dict[str, float]:
    overrides = ["parallel.engine=fsdp", f"parallel.weight_layout={layout}"]
    trainer = small_trainer(directory, *overrides)
    engine = trainer.engine
    return owned_norms(training_pieces(trainer.model, None, engine.owned_matrices()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bank", "row"])
def test_every_matrix_is_bounded_by_the_rank_that_owns_it(layout: str, tmp_path: Path) -> None:
    """Two ranks: none has all, together they have each exactly once, and K is that of one."""
    parts = run_processes(2, norms_of, tmp_path, layout)
    assert not parts[0].keys() & parts[1].keys() and all(parts)
    whole = {**parts[0], **parts[1]}
    recipe = small_trainer(tmp_path).recipe
    model = LipNeXt(recipe.model, recipe.run.seed)
    assert whole.keys() == owned_norms(training_pieces(model, None)).keys()
    assert bound_of_norms(whole) == pytest.approx(lipschitz_bound(model), rel=1e-6)
