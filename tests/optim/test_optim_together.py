"""Both optimizers as one, the learning rate, and which parameter goes where."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipnext_scale.models import LipNeXt, LipNeXtConfig
from lipnext_scale.optim import OptimConfig, Optimizers, learning_rate, split_parameters
from lipnext_scale.utils.config import ConfigError

TINY = LipNeXtConfig(depth=3, width=16, image_size=8, num_classes=4, blocks_per_bank=2)


def train(model: LipNeXt, optimizers: Optimizers, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.rand(6, 3, 8, 8, generator=generator)
        labels = torch.randint(4, (6,), generator=generator)
        optimizers.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizers.step()


def weights(model: LipNeXt) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --- the learning rate ------------------------------------------------------------------------


@given(
    lr=st.floats(1e-6, 10),
    warmup=st.integers(0, 50),
    rest=st.integers(2, 200),
    ratio=st.floats(0, 1),
)
def test_learning_rate_rises_then_falls_to_its_end(lr, warmup, rest, ratio):
    """Linear warm-up to lr, never 0; then monotone down; at the last step lr·final_ratio."""
    rates = [learning_rate(step, lr, warmup + rest, warmup, ratio) for step in range(warmup + rest)]
    for step in range(warmup):
        assert rates[step] == pytest.approx(lr * (step + 1) / warmup)
    assert rates[warmup] == pytest.approx(lr)
    assert all(a >= b for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    assert rates[-1] == pytest.approx(lr * ratio, rel=1e-9, abs=1e-15)
    assert min(rates[:-1]) > 0 and max(rates) <= lr * (1 + 1e-12)


def test_learning_rate_is_a_half_cosine():
    """Half way through, it is half way between the start and the end; beyond the end it stays."""
    assert learning_rate(60, 1.0, 101, 20, 0.2) == pytest.approx(0.6)
    assert learning_rate(40, 1.0, 101, 20, 0.0) == pytest.approx((1 + 0.5**0.5) / 2)
    assert learning_rate(500, 1.0, 101, 20, 0.2) == pytest.approx(0.2)


def test_learning_rate_of_a_run_of_one_step():
    """There is no division by zero in runs that are shorter than their warm-up."""
    assert learning_rate(0, 0.1, 1, 0, 0.5) == pytest.approx(0.1)
    assert learning_rate(0, 0.1, 1, 5, 0.5) == pytest.approx(0.02)


# --- which parameter goes where ---------------------------------------------------------------


def test_every_parameter_is_in_exactly_one_list():
    """The banks are orthogonal, all else is not, and nothing is lost or doubled."""
    model = LipNeXt(TINY, seed=0)
    orthogonal, euclidean = split_parameters(model)
    assert [name for name, _ in orthogonal] == ["groups.0.bank", "groups.1.bank"]
    names = [name for name, _ in orthogonal + euclidean]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for name, parameter in orthogonal + euclidean:
        assert parameter is model.get_parameter(name)


def test_frozen_parameters_are_in_neither_list():
    """What does not require a gradient is not optimised."""
    model = LipNeXt(TINY, seed=0)
    model.head.weight.requires_grad_(False)
    model.groups[0].bank.requires_grad_(False)
    orthogonal, euclidean = split_parameters(model)
    names = [name for name, _ in orthogonal + euclidean]
    assert "head.weight" not in names and "groups.0.bank" not in names
    assert len(names) == len(list(model.parameters())) - 2


def test_a_model_without_banks_is_refused():
    """A plain model, or one whose banks are all frozen, has nothing for ManifoldAdam."""
    with pytest.raises(ValueError, match="no trainable bank"):
        split_parameters(torch.nn.Linear(3, 3))
    model = LipNeXt(TINY, seed=0)
    for group in model.groups:
        group.bank.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable bank"):
        split_parameters(model)


# --- both together ----------------------------------------------------------------------------


def test_a_step_moves_every_parameter_and_the_banks_stay_orthogonal():
    """Both optimizers act on one model."""
    model = LipNeXt(TINY, seed=0)
    start = weights(model)
    train(
        model, Optimizers(split_parameters(model), OptimConfig(epochs=1, warmup_epochs=0)), range(3)
    )
    for name, value in model.state_dict().items():
        assert not torch.equal(value, start[name]), name
    for group in model.groups:
        gram = group.bank @ group.bank.mT
        torch.testing.assert_close(gram, torch.eye(16).expand_as(gram), rtol=0, atol=1e-5)


def test_schedule_reaches_both_with_their_own_rates():
    """set_learning_rate scales both rates alike and returns the manifold's."""
    model = LipNeXt(TINY, seed=0)
    config = OptimConfig(lr=0.5, euclidean_lr=0.1, final_lr_ratio=0.01)
    optimizers = Optimizers(split_parameters(model), config)
    assert optimizers.set_learning_rate(1, 100, 10) == pytest.approx(0.1)
    assert optimizers.euclidean.param_groups[0]["lr"] == pytest.approx(0.02)
    assert optimizers.set_learning_rate(99, 100, 10) == pytest.approx(0.005)
    assert optimizers.euclidean.param_groups[0]["lr"] == pytest.approx(0.001)


def test_slow_weights_of_all_parameters():
    """Inside, the whole model is the slow one; afterwards, also after an error, the fast one."""
    model = LipNeXt(TINY, seed=0)
    optimizers = Optimizers(split_parameters(model), OptimConfig(lookahead=6))
    optimizers.initialise_state()  # W is M·Rᵀ from here on
    start = weights(model)
    train(model, optimizers, range(4))
    fast = weights(model)
    with pytest.raises(RuntimeError):
        with optimizers.slow_weights():
            assert equal(weights(model), start)  # no synchronisation has happened yet
            raise RuntimeError
    assert equal(weights(model), fast) and not equal(fast, start)


def test_retract_joins_slow_and_fast_of_all_parameters():
    """After an epoch's end the slow model is the fast model, matrices and other parameters."""
    model = LipNeXt(TINY, seed=0)
    optimizers = Optimizers(split_parameters(model), OptimConfig(lookahead=6))
    train(model, optimizers, range(4))
    optimizers.retract()
    fast = weights(model)
    with optimizers.slow_weights():
        assert equal(weights(model), fast)


def test_state_dict_round_trip_continues_bit_equal():
    """A saved and loaded pair of optimizers continues the same run."""
    model = LipNeXt(TINY, seed=0)
    config = OptimConfig(lookahead=3, lr=0.01)
    optimizers = Optimizers(split_parameters(model), config)
    train(model, optimizers, range(4))
    both = (optimizers.manifold, optimizers.euclidean)
    saved, other = [copy.deepcopy(o.state_dict()) for o in both], copy.deepcopy(model)
    train(model, optimizers, range(4, 8))
    resumed = Optimizers(split_parameters(other), config)
    resumed.manifold.load_state_dict(saved[0])
    resumed.euclidean.load_state_dict(saved[1])
    train(other, resumed, range(4, 8))
    assert equal(weights(model), weights(other))


def test_configuration_reaches_the_optimizers():
    """Every field that names a hyperparameter of an optimizer arrives there."""
    model = LipNeXt(TINY, seed=0)
    config = OptimConfig(
        lr=0.3,
        euclidean_lr=0.2,
        betas=(0.5, 0.6),
        eps=1e-5,
        lookahead=4,
        second_moment_init="paper",
        exp_rule="bounded",
        retract_every=9,
    )
    optimizers = Optimizers(split_parameters(model), config)
    (manifold,), (euclidean,) = optimizers.manifold.param_groups, optimizers.euclidean.param_groups
    for key in ("betas", "eps", "lookahead", "second_moment_init", "exp_rule", "retract_every"):
        assert manifold[key] == getattr(config, key), key
    assert manifold["lr"] == 0.3 and euclidean["lr"] == 0.2
    assert euclidean["betas"] == (0.5, 0.6) and euclidean["eps"] == 1e-5
    assert euclidean["lookahead"] == 4


@pytest.mark.parametrize(
    "key, value",
    [
        ("lr", 0.0),
        ("euclidean_lr", -1.0),
        ("eps", 0.0),
        ("clip_norm", 0.0),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("lookahead", -1),
        ("retract_every", -1),
        ("epochs", 0),
        ("warmup_epochs", 800),
        ("warmup_epochs", -1),
        ("final_lr_ratio", 1.5),
        ("final_lr_ratio", -0.1),
    ],
)
def test_wrong_configuration_is_refused(key, value):
    """ConfigError, a ValueError, names the field and its value."""
    with pytest.raises(ConfigError, match=f"^{key} = ") as caught:
        OptimConfig(**{key: value})
    assert isinstance(caught.value, ValueError) and caught.value.key == key
