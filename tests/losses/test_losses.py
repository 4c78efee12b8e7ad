"""The losses against slow formulas, their gradients, the radius schedule and the configuration."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lipnext_scale.losses import (
    LossConfig,
    class_distances,
    compute_loss,
    emma_loss,
    logit_annealing_loss,
    margin_loss,
    trades_loss,
    training_radius,
)
from lipnext_scale.utils.config import ConfigError

LOSSES = {
    "emma": emma_loss,
    "margin": margin_loss,
    "trades": trades_loss,
    "logit_annealing": logit_annealing_loss,
}


def class_distances_reference(weight):
    """From the differences themselves: classes²·width numbers."""
    return (weight[:, None, :] - weight[None, :, :]).norm(dim=-1)


def draw(seed: int, samples: int = 5, classes: int = 6, scale: float = 1.0):
    """(logits, labels, distances) in float64, with distances of real unit rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (samples,), generator=generator)
    rows = F.normalize(torch.randn(classes, 7, generator=generator, dtype=torch.float64), dim=-1)
    return logits, labels, class_distances_reference(rows)


seeds = st.integers(0, 2**31)
epsilons = st.sampled_from([0.0, 1e-3, 36 / 255, 0.5, 3.0])
logit_scales = st.sampled_from([0.1, 1.0, 16.0])


# --- distances between classes ----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=seeds, classes=st.integers(2, 30), width=st.integers(2, 20))
def test_class_distances_equal_the_differences(seed, classes, width):
    """One product gives the norms of all differences, and exactly 0 on the diagonal."""
    generator = torch.Generator().manual_seed(seed)
    rows = F.normalize(torch.randn(classes, width, generator=generator).double(), dim=-1)
    fast = class_distances(rows)
    torch.testing.assert_close(fast, class_distances_reference(rows), rtol=0, atol=1e-6)
    assert not fast.diagonal().any()


def test_class_distances_need_no_unit_rows():
    """The formula is that of any rows."""
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 0.0]])
    expected = torch.tensor([[0.0, 5, 3], [5, 0, 4], [3, 4, 0]])
    torch.testing.assert_close(class_distances(rows), expected)


def test_class_distances_have_the_right_gradient():
    """Off the diagonal the gradient is that of the norms of differences."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    weight = torch.rand(8, 8, generator=generator, dtype=torch.float64).fill_diagonal_(0)
    fast, slow = values.clone().requires_grad_(), values.clone().requires_grad_()
    (class_distances(fast) * weight).sum().backward()
    off_diagonal = ~torch.eye(8, dtype=torch.bool)
    (class_distances_reference(slow)[off_diagonal] * weight[off_diagonal]).sum().backward()
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_distances_of_equal_rows_have_a_finite_gradient(dtype):
    """Two classes with the same row are at distance 0 without NaN in the gradient."""
    generator = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(4, 9, generator=generator, dtype=dtype), dim=-1)
    rows[2] = rows[1]
    rows.requires_grad_()
    distances = class_distances(rows)
    distances.sum().backward()
    assert float(distances.detach()[1, 2]) < 1e-3 and rows.grad.isfinite().all()
    assert rows.grad.abs().max() < 100


# --- each loss against its slow formula -------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=seeds, epsilon=epsilons, logit_scale=logit_scales)
def test_emma_is_the_formula_of_the_specification(seed, epsilon, logit_scale):
    """Sample by sample, class by class: l_j + e_j·ε·c_j with e_j = clip(-l_j/(ε c_j), 0.01, 1)."""
    logits, labels, distances = draw(seed)
    total = 0.0
    for row, y in zip(logits.tolist(), labels.tolist(), strict=True):
        shifted = []
        for j, logit in enumerate(row):
            difference, c = logit - row[y], float(distances[y, j])
            share = min(1.0, max(0.01, -difference / max(epsilon * c, 1e-8)))
            shifted.append(logit_scale * (difference + share * epsilon * c))
        total += math.log(sum(math.exp(s) for s in shifted)) - shifted[y]
    result = emma_loss(logits, labels, distances, epsilon, logit_scale)
    assert float(result) == pytest.approx(total / len(labels), rel=1e-9, abs=1e-12)


def test_emma_gradient_holds_the_shares_constant():
    """The gradient is that of cross-entropy after a shift by constants, also where e_j varies."""
    logits, labels, distances = draw(1, scale=0.3)
    relative = logits - logits.gather(1, labels[:, None])
    reach = 0.5 * distances[labels]
    share = (-relative / reach.clamp_min(1e-8)).clamp(0.01, 1)
    assert bool(((share > 0.01) & (share < 1)).any())  # else the question does not arise
    mine, constant = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    emma_loss(mine, labels, distances, 0.5).backward()
    F.cross_entropy(constant + share * reach, labels).backward()
    torch.testing.assert_close(mine.grad, constant.grad, rtol=1e-12, atol=1e-14)


def test_emma_trains_the_distances():
    """c_j is not held constant: a larger distance of an attacking class raises the loss."""
    logits, labels, distances = draw(2)
    distances.requires_grad_()
    emma_loss(logits, labels, distances, 0.5).backward()
    for y in labels.tolist():
        others = [j for j in range(6) if j != y]
        assert bool((distances.grad[y, others] > 0).all())


@settings(max_examples=30, deadline=None)
@given(seed=seeds, epsilon=epsilons, logit_scale=logit_scales)
def test_margin_gives_every_other_class_the_whole_radius(seed, epsilon, logit_scale):
    """-log of the label's probability when each other logit is raised by ε·c_yj."""
    logits, labels, distances = draw(seed)
    total = 0.0
    for row, y in zip(logits.tolist(), labels.tolist(), strict=True):
        attacked = [logit_scale * (row[j] + epsilon * float(distances[y, j])) for j in range(6)]
        largest = max(attacked)
        total += largest + math.log(sum(math.exp(a - largest) for a in attacked)) - attacked[y]
    result = margin_loss(logits, labels, distances, epsilon, logit_scale)
    assert float(result) == pytest.approx(total / len(labels), rel=1e-9, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, epsilon=epsilons, weight=st.sampled_from([0.0, 1.0, 2.5]))
def test_trades_adds_the_divergence_from_the_network_with_a_bottom_class(seed, epsilon, weight):
    """CE + λ·KL(p ‖ p⊥), the divergence written out over classes with p(⊥) = 0."""
    logits, labels, distances = draw(seed)
    expected = F.cross_entropy(logits, labels)
    for row in logits:
        top = int(row.argmax())
        bottom = max(float(row[j] + epsilon * distances[top, j]) for j in range(6) if j != top)
        p = torch.softmax(row, dim=0)
        q = torch.softmax(torch.cat([row, row.new_tensor([bottom])]), dim=0)[:6]
        expected = expected + weight * (p * (p / q).log()).sum() / len(labels)
    result = trades_loss(logits, labels, distances, epsilon, weight=weight)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    seed=seeds,
    epsilon=epsilons,
    temperature=st.sampled_from([0.25, 0.75, 2.0]),
    offset=st.sampled_from([0.0, 2.0]),
    power=st.sampled_from([0.0, 0.5, 5.0]),
)
def test_logit_annealing_is_the_formula(seed, epsilon, temperature, offset, power):
    """-T·(1-p)^β·log p with p the label's probability at temperature T, ξ taken off its logit."""
    logits, labels, distances = draw(seed)
    total = 0.0
    for row, y in zip(logits.tolist(), labels.tolist(), strict=True):
        shifted = []
        for j, logit in enumerate(row):
            difference, reach = logit - row[y], epsilon * float(distances[y, j])
            share = min(1.0, max(0.01, -difference / max(reach, 1e-8)))
            shifted.append((difference + share * reach - offset * (j == y)) / temperature)
        p = math.exp(shifted[y]) / sum(math.exp(s) for s in shifted)
        total += -temperature * (1 - p) ** power * math.log(p)
    result = logit_annealing_loss(
        logits, labels, distances, epsilon, temperature=temperature, offset=offset, power=power
    )
    assert float(result) == pytest.approx(total / len(labels), rel=1e-7, abs=1e-12)


def test_logit_annealing_stops_pushing_samples_with_enough_margin():
    """The gradient of a confident sample falls much faster than cross-entropy's."""
    labels, distances = torch.tensor([0]), torch.ones(2, 2, dtype=torch.float64)
    gradients = {}
    for loss in (logit_annealing_loss, emma_loss):
        logits = torch.tensor([[8.0, 0.0]], dtype=torch.float64, requires_grad=True)
        loss(logits, labels, distances, 0.0).backward()
        gradients[loss] = float(logits.grad.abs().max())
    assert 0 < gradients[logit_annealing_loss] < 1e-3 * gradients[emma_loss]


# --- what they have in common -----------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_logit_scale_multiplies_logits_and_distances_alike(name):
    """Scaling inside the loss is the same as a network with all logits so much larger."""
    logits, labels, distances = draw(3)
    scaled = LOSSES[name](logits, labels, distances, 0.3, logit_scale=7.0)
    torch.testing.assert_close(scaled, LOSSES[name](7 * logits, labels, 7 * distances, 0.3))
    assert not torch.isclose(scaled, LOSSES[name](logits, labels, distances, 0.3))


@pytest.mark.parametrize("name", ["emma", "margin"])
def test_radius_zero_is_cross_entropy(name):
    """Without a radius there is nothing to defend against."""
    logits, labels, distances = draw(4)
    result = LOSSES[name](logits, labels, distances, 0.0, logit_scale=3.0)
    torch.testing.assert_close(result, F.cross_entropy(3 * logits, labels))


def test_radius_zero_of_logit_annealing_and_trades():
    """Annealing without offset and power is cross-entropy; TRADES without weight as well."""
    logits, labels, distances = draw(4)
    plain = F.cross_entropy(logits, labels)
    annealed = logit_annealing_loss(
        logits, labels, distances, 0.0, temperature=1.0, offset=0.0, power=0.0
    )
    torch.testing.assert_close(annealed, plain)
    torch.testing.assert_close(trades_loss(logits, labels, distances, 0.0, weight=0.0), plain)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, smaller=st.floats(0, 1), more=st.floats(0.01, 1))
def test_a_larger_radius_never_lowers_margin_and_trades(seed, smaller, more):
    """And EMMA is never below cross-entropy nor above the full margin loss."""
    logits, labels, distances = draw(seed)
    for loss in (margin_loss, trades_loss):
        one = float(loss(logits, labels, distances, smaller))
        assert float(loss(logits, labels, distances, smaller + more)) >= one - 1e-12
    emma = float(emma_loss(logits, labels, distances, smaller))
    assert float(F.cross_entropy(logits, labels)) - 1e-12 <= emma
    assert emma <= float(margin_loss(logits, labels, distances, smaller)) + 1e-12


@pytest.mark.parametrize("name", [*LOSSES, "cross_entropy"])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4])
@pytest.mark.parametrize("logit_scale", [1.0, 100.0])
def test_gradients_are_finite_at_extreme_logits(name, scale, logit_scale):
    """All logits equal, nearly equal, or thousands apart: losses and gradients stay finite."""
    config = LossConfig(name=name, logit_scale=logit_scale, annealing_power=0.5)
    logits, labels, distances = (t.float() if t.is_floating_point() else t for t in draw(5))
    labels[0], labels[1] = logits[0].argmax(), logits[1].argmin()  # surely right, surely wrong
    logits = (scale * logits).requires_grad_()
    distances.requires_grad_()
    loss = compute_loss(config, logits, labels, distances, 0.5)
    loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all()
    assert distances.grad is None or distances.grad.isfinite().all()


@pytest.mark.parametrize("name", [*LOSSES, "cross_entropy"])
def test_two_classes_suffice(name):
    """The smallest problem has a loss."""
    logits = torch.tensor([[1.0, -1.0]], requires_grad=True)
    distances = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
    compute_loss(LossConfig(name=name), logits, torch.tensor([1]), distances, 0.1).backward()
    assert logits.grad[0, 0] > 0 > logits.grad[0, 1]


def test_compute_loss_passes_the_configuration_on():
    """Each name calls its function with the numbers of the configuration."""
    logits, labels, distances = draw(6)
    arguments = (logits, labels, distances, 0.3)
    options = {
        "logit_scale": 2.0,
        "trades_weight": 3.0,
        "annealing_temperature": 0.5,
        "annealing_offset": 1.0,
        "annealing_power": 2.0,
    }
    expected = {
        "emma": emma_loss(*arguments, 2.0),
        "margin": margin_loss(*arguments, 2.0),
        "trades": trades_loss(*arguments, 2.0, weight=3.0),
        "logit_annealing": logit_annealing_loss(
            *arguments, 2.0, temperature=0.5, offset=1.0, power=2.0
        ),
        "cross_entropy": F.cross_entropy(2 * logits, labels),
    }
    for name, value in expected.items():
        assert torch.equal(compute_loss(LossConfig(name=name, **options), *arguments), value), name
    assert len({float(value) for value in expected.values()}) == 5


# --- schedule and configuration ---------------------------------------------------------------


@given(
    epochs=st.integers(1, 800),
    epsilon=st.floats(0.01, 2),
    low=st.floats(0, 1),
    more=st.floats(0, 3),
)
def test_training_radius_grows_over_the_first_half(epochs, epsilon, low, more):
    """From ε·r_min, linearly to ε·r_max at half of the epochs, then constant."""
    config = LossConfig(epsilon=epsilon, radius_min=low, radius_max=low + more)
    assert training_radius(config, 0, epochs) == pytest.approx(epsilon * low)
    middle = training_radius(config, epochs / 4, epochs)
    assert middle == pytest.approx(epsilon * (low + more / 2))
    for epoch in (epochs / 2, 0.75 * epochs, epochs):
        assert training_radius(config, epoch, epochs) == pytest.approx(epsilon * (low + more))


def test_training_radius_of_the_paper():
    """CIFAR: 36/255·(0.1 + 2.9·min(1, 2·epoch/800))."""
    config = LossConfig()
    assert training_radius(config, 0, 800) == pytest.approx(3.6 / 255)
    assert training_radius(config, 100, 800) == pytest.approx(36 / 255 * (0.1 + 2.9 / 4))
    assert training_radius(config, 799, 800) == pytest.approx(108 / 255)


@pytest.mark.parametrize(
    "key, changes",
    [
        ("name", {"name": "hinge"}),
        ("epsilon", {"epsilon": -0.1}),
        ("radius_min", {"radius_min": -1.0}),
        ("radius_min", {"radius_min": 4.0}),
        ("radius_max", {"radius_min": 0.0, "radius_max": -1.0}),
        ("logit_scale", {"logit_scale": 0.0}),
        ("trades_weight", {"trades_weight": -1.0}),
        ("annealing_temperature", {"annealing_temperature": 0.0}),
        ("annealing_power", {"annealing_power": -1.0}),
    ],
)
def test_wrong_configuration_is_refused(key, changes):
    """ConfigError, a ValueError, names the field; an unknown loss is not taken for another."""
    with pytest.raises(ValueError, match=f"^{key} = ") as caught:
        dataclasses.replace(LossConfig(), **changes)
    assert isinstance(caught.value, ConfigError) and caught.value.key == key
