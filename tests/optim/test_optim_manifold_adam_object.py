"""ManifoldAdam as a torch optimizer: its state, its transfers, and what it refuses."""

import copy
from collections.abc import Callable

import pytest
import torch
from banks import bank, gradients, run
from torch.utils._python_dispatch import TorchDispatchMode

from lipnext_scale.optim import ManifoldAdam

# --- the optimizer as an object ---------------------------------------------------------------


def test_state_dict_round_trip_continues_bit_equal():
    """Saved in the middle of a Lookahead period and loaded elsewhere, the run is the same run."""
    x = bank(2, 6, 6, dtype=torch.float32)
    grads = gradients(x, 15)
    optimizer = ManifoldAdam([x], lr=0.02, lookahead=5, retract_every=7, second_moment_init="paper")
    run(optimizer, x, grads[:8])
    saved, weights = copy.deepcopy(optimizer.state_dict()), x.detach().clone()
    run(optimizer, x, grads[8:])

    other = torch.nn.Parameter(weights)
    resumed = ManifoldAdam([other], lr=0.5)  # what was saved wins
    resumed.load_state_dict(saved)
    run(resumed, other, grads[8:])
    assert torch.equal(x, other)
    for key, value in optimizer.state[x].items():
        assert torch.equal(value, resumed.state[other][key]), key
        assert value.dtype == resumed.state[other][key].dtype


def test_parameters_without_gradient_are_left_alone():
    """Frozen for a step means: no move, no state, no count; the others move."""
    x, idle = bank(6, 6), bank(2, 6, 6, seed=2)
    kept = idle.detach().clone()
    optimizer = ManifoldAdam([x, idle], lr=0.02)
    start = x.detach().clone()
    run(optimizer, x, gradients(x, 3))
    assert torch.equal(idle, kept) and not optimizer.state[idle]
    assert not torch.equal(x, start)
    idle.grad, x.grad = gradients(idle, 1)[0], None
    moved = x.detach().clone()
    optimizer.step()
    assert torch.equal(x, moved) and not torch.equal(idle, kept)
    assert int(optimizer.state[idle]["step"]) == 1 and int(optimizer.state[x]["step"]) == 3
    optimizer.zero_grad()
    optimizer.step()  # no gradient anywhere


def test_closure_is_called_with_gradients_enabled():
    """step(closure) computes the loss, uses its gradients and returns it."""
    x = bank(6, 6)
    optimizer = ManifoldAdam([x], lr=0.02)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = x.trace()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] > x.trace().item()


def test_parameter_groups_have_their_own_settings():
    """Each group moves by its own learning rate, rule and period."""
    still, one, two = bank(6, 6), bank(6, 6), bank(6, 6)
    optimizer = ManifoldAdam(
        [
            {"params": [still], "lr": 0.0},
            {"params": [one], "exp_rule": "bounded", "lookahead": 2},
            {"params": [two], "lookahead": 3},
        ],
        lr=0.01,
    )
    start = still.detach().clone()
    for gradient in gradients(still, 2):
        for parameter in (still, one, two):
            parameter.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(still, start)
    assert torch.equal(one, optimizer.state[one]["slow"])
    assert torch.equal(optimizer.state[two]["slow"], start) and not torch.equal(two, start)


def test_an_empty_bank_is_no_exception():
    """A rank whose shard holds no matrix makes the same calls as the others."""
    empty = torch.nn.Parameter(torch.empty(0, 6, 6))
    x = bank(2, 6, 6, dtype=torch.float32)
    for rule in ("paper", "bounded"):
        optimizer = ManifoldAdam([empty, x], exp_rule=rule, lookahead=2)
        for gradient in gradients(x, 2):
            empty.grad, x.grad = torch.zeros_like(empty), gradient
            optimizer.step()
        optimizer.retract()
        with optimizer.slow_weights():
            pass
        assert int(optimizer.state[empty]["step"]) == 2


class CountHostTransfers(TorchDispatchMode):
    """Counts .item(), float(), bool() and the like on floating-point tensors."""

    count = 0

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("exp_rule", ["paper", "bounded"])
def test_two_host_transfers_per_step(exp_rule, monkeypatch):
    """However many banks there are, the host waits for the device twice in a step."""
    banks = [bank(3, 6, 6), bank(6, 6, seed=1), bank(2, 9, 9, seed=2)]
    optimizer = ManifoldAdam(banks, lr=1e-3, exp_rule=exp_rule, lookahead=2)
    calls: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda self: calls.append(self.numel()) or tolist(self)
    )
    for _ in range(3):
        calls.clear()
        for parameter in banks:
            parameter.grad = torch.randn_like(parameter)
        with CountHostTransfers() as mode:
            optimizer.step()
        assert calls == [len(banks), 3 + 1 + 2]
        assert mode.count == 0


# --- steps that are not usable ----------------------------------------------------------------

FORMS = [(form, kind) for form in ("merged", "product") for kind in ("fp32", "tensor_core")]
NAN = torch.tensor(float("nan"))


def pairs_and_optimizer(form: str, kind: str) -> tuple[torch.nn.Parameter, ManifoldAdam]:
    """Lookahead at every second step, a retraction at every third."""
    x = bank(3, 2, 8, 8, dtype=torch.float32)
    periods = {"lookahead": 2, "retract_every": 3}
    return x, ManifoldAdam([x], lr=0.02, parametrisation=form, products=kind, **periods)


@pytest.mark.parametrize("form, kind", FORMS)
def test_a_step_that_is_not_usable_moves_nothing(form, kind):
    """Also where Lookahead or a retraction is due; with its count set right, it has not been."""
    (x, optimizer), (y, undisturbed) = (pairs_and_optimizer(form, kind) for _ in range(2))
    grads = gradients(x, 6)
    run(optimizer, x, grads[:1])
    before = [t.clone() for t in (x.detach(), *optimizer.state[x].values())]
    for _ in range(6):
        x.grad = torch.full_like(x, float("nan"))
        optimizer.step(scale=NAN, usable=torch.tensor(False))
    optimizer.set_step(1)
    for old, now in zip(before, (x, *optimizer.state[x].values()), strict=True):
        assert torch.equal(old, now)
    run(optimizer, x, grads[1:])
    run(undisturbed, y, grads)
    assert torch.equal(x, y)


@pytest.mark.parametrize("form, kind", FORMS)
def test_a_usable_step_is_any_step(form, kind):
    (x, flagged), (y, plain) = (pairs_and_optimizer(form, kind) for _ in range(2))
    for gradient in gradients(x, 6):
        x.grad, y.grad = gradient.clone(), gradient.clone()
        flagged.step(usable=torch.tensor(True))
        plain.step()
    assert torch.equal(x, y)
    for key, value in plain.state[y].items():
        assert torch.equal(flagged.state[x][key], value), key


# --- what it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.zeros(4, 5), r"blocks\.bank has shape \(4, 5\).*square"),
        (torch.zeros(2, 3, 4), r"blocks\.bank has shape \(2, 3, 4\)"),
        (torch.zeros(4), r"blocks\.bank has shape \(4,\)"),
        (torch.eye(4).expand(1, 2, 2, 4, 4), r"blocks\.bank has shape \(1, 2, 2, 4, 4\)"),
        (1.01 * torch.eye(4), r"blocks\.bank is not orthogonal.*0\.0201"),
        (torch.stack([torch.eye(4), torch.ones(4, 4)]), r"blocks\.bank is not orthogonal"),
        (torch.full((4, 4), float("nan")), r"blocks\.bank is not orthogonal.*nan"),
        (torch.eye(4, dtype=torch.bfloat16), r"blocks\.bank is torch\.bfloat16.*float32"),
        (torch.eye(4, dtype=torch.float16), r"blocks\.bank is torch\.float16"),
    ],
)
def test_wrong_parameters_are_refused_by_name(value, message):
    """Shapes, types and matrices off the manifold are refused, naming the parameter."""
    good = bank(4, 4)
    with pytest.raises(ValueError, match=message):
        ManifoldAdam([("good", good), ("blocks.bank", torch.nn.Parameter(value.clone()))])


def test_unnamed_parameters_are_refused_by_number():
    """Without names the message counts."""
    with pytest.raises(ValueError, match="parameter 1 is not orthogonal"):
        ManifoldAdam([bank(4, 4), torch.nn.Parameter(torch.zeros(4, 4))])


def test_meta_parameters_are_accepted():
    """Before the weights are materialised there is nothing to look at."""
    ManifoldAdam([torch.nn.Parameter(torch.empty(2, 4, 4, device="meta"))])


@pytest.mark.parametrize(
    "key, value",
    [
        ("lr", -1e-3),
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, -0.1)),
        ("eps", 0.0),
        ("lookahead", -1),
        ("retract_every", -5),
        ("second_moment_init", "one"),
        ("exp_rule", "exact"),
        ("exp_tolerance", -1e-7),
        ("exp_tolerance", 0.0),
    ],
)
def test_wrong_hyperparameters_are_refused(key, value):
    """The message names the key and its value; a group's own settings are checked as well."""
    with pytest.raises(ValueError, match=f"{key} = "):
        ManifoldAdam([bank(4, 4)], **{key: value})
    with pytest.raises(ValueError, match=f"{key} = "):
        ManifoldAdam([{"params": [bank(4, 4)], key: value}])
