"""utils/products.py: both libraries sum float32 products, as the certificate assumes."""

import pytest
import torch

from lipnext_scale.utils import products

SHAPES = [(256, 48, 64), (33, 17, 5), (64, 512, 10)]  # rows, inner length, columns


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def library(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "ONEDNN", request.param)


@pytest.mark.parametrize("rows, inner, columns", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_an_entry_loses_no_more_than_a_sum_of_products_can(
    library, rows, inner, columns, transposed
):
    """|fl(x·w + b) - (x·w + b)| ≤ γ_{n+1}·(|x||w| + |b|), for any order of the sum."""
    torch.manual_seed(0)
    x = torch.randn(inner, rows).mT if transposed else torch.randn(rows, inner)
    weight = torch.randn(inner, columns).mT if transposed else torch.randn(columns, inner)
    for bias in (None, 100 * torch.randn(columns)):
        added = torch.zeros(columns).double() if bias is None else bias.double()
        out = torch.empty(rows, columns)
        assert products.product(x, weight, bias, out=out) is out
        exact = x.double() @ weight.double().mT + added
        most = x.double().abs() @ weight.double().abs().mT + added.abs()
        unit = (inner + 1) * 2.0**-24
        for found in (out, products.product(x, weight, bias)):
            assert ((found - exact).abs() <= unit / (1 - unit) * most).all()


def test_gradients(library):
    torch.manual_seed(0)
    x, weight = (torch.randn(9, n, requires_grad=True) for n in (7, 7))
    sent = torch.randn(9, 9)
    found = torch.autograd.grad(products.linear(x, weight), (x, weight), sent)
    expected = torch.autograd.grad(x @ weight.mT, (x, weight), sent)
    torch.testing.assert_close(found, expected)
