"""The whole network: configuration, construction, seeds, grouping, head."""

import dataclasses

import pytest
import torch

from lipnext_scale.manifold import orthogonality_error
from lipnext_scale.models import BlockGroup, Head, LipNeXt, LipNeXtConfig, blocks
from lipnext_scale.utils.config import ConfigError

TINY = LipNeXtConfig(depth=5, width=16, image_size=8, num_classes=4)


def config(**changes) -> LipNeXtConfig:
    return dataclasses.replace(TINY, **changes)


def images(count: int = 3, seed: int = 0, side: int = 8, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, side, side, generator=generator, dtype=dtype)


def matrices(model: LipNeXt) -> torch.Tensor:
    """The pairs (R, W) of all banks, [depth, 2, C, C], in the order of the blocks."""
    return torch.cat([group.bank.detach() for group in model.groups])


# --- configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, changes",
    [
        ("depth", {"depth": 0}),
        ("width", {"width": 0}),
        ("width", {"width": 11}),  # fewer than the 12 channels of the stem
        ("width", {"width": 13, "activation": "minmax"}),
        ("image_size", {"image_size": 0}),
        ("patch_size", {"patch_size": 0}),
        ("patch_size", {"patch_size": 3}),
        ("in_channels", {"in_channels": 0}),
        ("num_classes", {"num_classes": 1}),
        ("shift_ratio", {"shift_ratio": -0.1}),
        ("shift_ratio", {"shift_ratio": 0.26}),
        ("padding", {"padding": "reflect"}),
        ("activation", {"activation": "relu"}),
        ("beta", {"beta": -0.01}),
        ("beta", {"beta": 1.01}),
        ("blocks_per_bank", {"blocks_per_bank": -1}),
        ("blocks_per_bank", {"blocks_per_bank": 6}),
    ],
)
def test_wrong_configuration_is_refused(key, changes):
    """ConfigError, which is a ValueError, names the field and its value."""
    with pytest.raises(ValueError, match=f"^{key} = ") as caught:
        config(**changes)
    assert isinstance(caught.value, ConfigError) and caught.value.key == key


def test_message_for_a_narrow_width_says_what_is_needed():
    """The stem needs in_channels·patch² channels."""
    with pytest.raises(ConfigError, match="width = 100: must be at least .* = 768"):
        LipNeXtConfig(width=100, image_size=224, patch_size=16)


def test_paper_sizes():
    """The parameters in banks are 2·L·W²: 64Mi for L32W1024, and the model has as many."""
    assert LipNeXtConfig().bank_parameters == 64 * 2**20
    assert LipNeXtConfig(width=4096).bank_parameters == 2**30
    model = LipNeXt(TINY, seed=0)
    assert sum(group.bank.numel() for group in model.groups) == TINY.bank_parameters


# --- input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, message",
    [
        (torch.zeros(2, 3, 9, 9), r"\(2, 3, 9, 9\).*\[N, 3, 8, 8\]"),
        (torch.zeros(2, 3, 8, 4), r"\(2, 3, 8, 4\)"),
        (torch.zeros(2, 1, 8, 8), r"\(2, 1, 8, 8\)"),
        (torch.zeros(2, 8, 8, 3), r"\(2, 8, 8, 3\)"),
        (torch.zeros(3, 8, 8), r"\(3, 8, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), r"torch\.uint8.*floating point"),
    ],
)
def test_wrong_images_are_refused(batch, message):
    """The message has the shape or type that came and the one that is right."""
    model = LipNeXt(TINY, seed=0)
    with pytest.raises(ValueError, match=message):
        model(batch)


def test_images_are_centred_and_not_changed():
    """The grey image 0.5 is the network's zero: without biases all its features are 0."""
    model = LipNeXt(TINY, seed=0)
    grey = torch.full((1, 3, 8, 8), 0.5)
    assert not model.features(grey).any()
    batch, kept = images(), images()
    model(batch)
    assert torch.equal(batch, kept)


def test_features_keep_the_norm_of_the_image():
    """With circular padding every layer is an isometry at the start: ‖f(x)‖ = ‖x - 0.5‖."""
    batch = images(dtype=torch.float64)
    for activation in ("beta_abs", "minmax"):
        model = LipNeXt(config(activation=activation), seed=0).double()
        expected = (batch - 0.5).flatten(1).norm(dim=1)
        torch.testing.assert_close(
            model.features(batch).norm(dim=1), expected, rtol=1e-5, atol=1e-6
        )


def test_features_are_the_composition_of_the_parts():
    """features = pool(groups(stem(x - 0.5))), logits = head(features)."""
    model = LipNeXt(config(blocks_per_bank=2), seed=0)
    x = blocks.space_to_depth(images() - 0.5, 2, 16)
    for group in model.groups:
        x = group(x)
    features = blocks.l2_pool(x)
    assert torch.equal(model.features(images()), features)
    assert torch.equal(model(images()), model.head(features)[0])


def test_images_do_not_influence_each_other():
    """The logits of an image do not depend on the batch it comes in."""
    model = LipNeXt(TINY, seed=0)
    batch = images(5)
    torch.testing.assert_close(model(batch)[3:4], model(batch[3:4]), rtol=1e-5, atol=1e-5)


def test_every_parameter_gets_a_gradient():
    """Nothing in the network is cut off from the loss."""
    model = LipNeXt(TINY, seed=0)
    torch.nn.functional.cross_entropy(model(images()), torch.tensor([0, 1, 2])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# --- initial weights --------------------------------------------------------------------------


def test_initial_values():
    """R on O(C), W = Rᵀ (so M = W·R = I), biases and positions 0."""
    model = LipNeXt(TINY, seed=3)
    banks = matrices(model)
    assert banks.shape == (5, 2, 16, 16)
    assert float(orthogonality_error(banks).max()) < 1e-6
    rotations, weights = banks.unbind(1)
    assert torch.equal(weights, rotations.mT)
    assert not torch.equal(rotations[0], rotations[1])
    for group in model.groups:
        assert not group.bias.any() and not group.pos.any()
    assert not model.head.bias.any()


@pytest.mark.parametrize("activation", ["beta_abs", "minmax"])
def test_another_seed_is_another_function(activation):
    one, two = (LipNeXt(config(activation=activation), seed=seed) for seed in (7, 8))
    assert not torch.equal(one(images()), two(images()))


@pytest.mark.parametrize("per_bank, sizes", [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (5, [5])])
def test_grouping_does_not_change_the_network(per_bank, sizes):
    """However the blocks are put into banks, the initial weights and the function are the same."""
    whole, parts = LipNeXt(TINY, seed=1), LipNeXt(config(blocks_per_bank=per_bank), seed=1)
    assert [group.count for group in parts.groups] == sizes
    assert [group.bank.shape for group in parts.groups] == [(size, 2, 16, 16) for size in sizes]
    assert torch.equal(matrices(whole), matrices(parts))
    assert torch.equal(whole.head.weight, parts.head.weight)
    torch.testing.assert_close(whole(images()), parts(images()), rtol=1e-6, atol=1e-6)


def test_seeds():
    """Equal seeds give equal weights; None takes one from torch's global generator."""

    def head_and_bank(seed: int | None) -> torch.Tensor:
        model = LipNeXt(TINY, seed=seed)
        return torch.cat([matrices(model).flatten(), model.head.weight.detach().flatten()])

    assert torch.equal(head_and_bank(5), head_and_bank(5))
    assert not torch.equal(head_and_bank(5), head_and_bank(6))
    torch.manual_seed(0)
    first, second = head_and_bank(None), head_and_bank(None)
    torch.manual_seed(0)
    assert torch.equal(head_and_bank(None), first) and not torch.equal(first, second)
    state = torch.random.get_rng_state()
    head_and_bank(5)
    assert torch.equal(torch.random.get_rng_state(), state)  # a seed leaves the global one alone


def test_meta_construction_allocates_nothing_and_fills_later():
    """Built on the meta device and filled, the model is the one that is built directly."""
    with torch.device("meta"):
        model = LipNeXt(config(blocks_per_bank=2), seed=4)
        large = LipNeXt(LipNeXtConfig(width=5792))
    assert all(parameter.is_meta for parameter in [*model.parameters(), *large.parameters()])
    assert sum(p.numel() for p in large.parameters()) > 2 * 10**9
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.reset_parameters(4)
    direct = LipNeXt(config(blocks_per_bank=2), seed=4)
    for name, value in direct.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_weights_do_not_depend_on_the_default_device():
    """A seed's weights are drawn on the CPU, also under `with torch.device(...)`."""
    model, direct = LipNeXt(TINY, seed=0), LipNeXt(TINY, seed=4)
    with torch.device("meta"):
        model.reset_parameters(4)
    for name, value in direct.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


# --- head and options -------------------------------------------------------------------------


def test_head_rows_are_normalised():
    """The length of a row of head.weight does not matter; its direction and the bias do."""
    model = LipNeXt(TINY, seed=0)
    before = model(images())
    with torch.no_grad():
        model.head.weight.mul_(torch.tensor([[0.1], [3.0], [100.0], [1.0]]))
    torch.testing.assert_close(model(images()), before, rtol=1e-5, atol=1e-5)
    rows = model.head.rows().norm(dim=1)
    torch.testing.assert_close(rows, torch.ones(4))
    with torch.no_grad():
        model.head.bias.copy_(torch.arange(4.0))
    torch.testing.assert_close(model(images()), before + torch.arange(4.0), rtol=1e-5, atol=1e-5)


def test_head_computes_in_float32():
    """With bfloat16 weights and features the logits are float32."""
    head = Head(8, 3).to(torch.bfloat16)
    head.reset_parameters(0)
    assert head(torch.ones(2, 8, dtype=torch.bfloat16))[0].dtype == torch.float32
    assert head.double()(torch.ones(2, 8, dtype=torch.float64))[0].dtype == torch.float64


def test_positional_embedding_is_optional():
    """Without it the groups have no `pos`, and a cyclic shift of the image changes no feature."""
    model = LipNeXt(config(positional_embedding=False), seed=0)
    assert all(group.pos is None for group in model.groups)
    assert not any("pos" in name for name in model.state_dict())
    rolled = images().roll((2, -4), dims=(2, 3))  # by whole patches
    torch.testing.assert_close(
        model.features(images()), model.features(rolled), atol=1e-5, rtol=1e-4
    )
    with_pos = LipNeXt(TINY, seed=0)
    with torch.no_grad():
        for group in with_pos.groups:
            group.pos.copy_(
                torch.randn(group.pos.shape, generator=torch.Generator().manual_seed(0))
            )
    difference = with_pos.features(images()) - with_pos.features(rolled)
    assert difference.abs().max().item() > 1e-2


@pytest.mark.parametrize(
    "changes",
    [{"shift_ratio": 0.25}, {"padding": "zero"}, {"activation": "minmax"}, {"beta": 0.5}],
)
def test_every_option_changes_the_function(changes):
    """No field is silently ignored."""
    default = LipNeXt(TINY, seed=0).features(images())
    changed = LipNeXt(config(**changes), seed=0).features(images())
    assert (default - changed).abs().max().item() > 1e-3


def test_without_shift_tokens_are_independent():
    """shift_ratio = 0: changing one patch changes no other token before the pooling."""
    model = LipNeXt(config(shift_ratio=0.0), seed=0)
    one = images(1)
    other = one.clone()
    other[..., :2, :2] = 0
    outputs = []
    for batch in (one, other):
        x = blocks.space_to_depth(batch - 0.5, 2, 16)
        for group in model.groups:
            x = group(x)
        outputs.append(x)
    changed = (outputs[0] - outputs[1]).abs().amax(-1)[0] > 1e-6
    assert changed[0, 0] and int(changed.sum()) == 1


def test_groups_are_block_groups_with_one_bank_each():
    """What is sharded from outside: modules with a bank [count, 2, C, C]."""
    model = LipNeXt(config(blocks_per_bank=2), seed=0)
    assert all(isinstance(group, BlockGroup) for group in model.groups)
    assert [group.first for group in model.groups] == [0, 2, 4]
    names = {name.split(".")[-1] for name in model.state_dict() if name.startswith("groups")}
    assert names == {"bank", "bias", "pos"}
