"""oneDNN's products against plain ones in float64."""

import copy

import pytest
import torch
from helpers import table, tiny_llama
from torch import nn

from tether.models import cpu_matmul
from tether.models.cpu_matmul import OneDnnLinear, OneDnnMatmul, matmul_transposed, use_onednn

needs_onednn = pytest.mark.skipif(not cpu_matmul.HAS_ONEDNN, reason="torch without oneDNN on x86")


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    """Also where MKL is faster."""
    monkeypatch.setattr(cpu_matmul, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(cpu_matmul, "FASTER_THAN_MKL", cpu_matmul.HAS_ONEDNN)


def matrices(*shapes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@table("bias", [False, True])
@table("rows", [(7,), (2, 3)])
def test_a_layer_and_its_gradients_are_those_of_float64(bias, rows):
    x, g = matrices((*rows, 24), (*rows, 40))
    layer = nn.Linear(24, 40, bias=bias)
    slow = copy.deepcopy(layer).double()
    use_onednn(layer)
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    outputs = [layer(inputs[0]), slow(inputs[1])]
    assert type(outputs[0].grad_fn).__name__ == "OneDnnMatmulBackward"
    close(outputs[0], outputs[1])
    outputs[0].backward(g)
    outputs[1].backward(g.double())
    close(inputs[0].grad, inputs[1].grad)
    for weight, expected in zip(layer.parameters(), slow.parameters(), strict=True):
        close(weight.grad, expected.grad)


@needs_onednn
def test_gradients_of_gradients_are_those_of_float64():
    """sum((d/dx sum(sin(x W^T)))^2), by x and by W: what a Fisher-vector product asks for."""

    def twice(x, w, multiply):
        (first,) = torch.autograd.grad(multiply(x, w).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, w))

    x, w = (m.requires_grad_() for m in matrices((5, 24), (40, 24)))
    found = twice(x, w, lambda x, w: OneDnnMatmul.apply(x, w, None))
    x, w = (m.detach().double().requires_grad_() for m in (x, w))
    for a, b in zip(found, twice(x, w, lambda x, w: x @ w.T), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@table("turned", [False, True])
def test_matrices_with_gaps_or_turned_are_multiplied_right(turned):
    a, b = matrices((6, 64), (9, 64))
    a, b = a[:, ::2], b[:, 3:35]
    if turned:
        a, b = a.T.contiguous().T, b.T.contiguous().T
    close(matmul_transposed(a, b), a.double() @ b.double().T)


def test_a_gradient_that_repeats_one_number_is_multiplied_right():
    """sum() sends an expanded number back, whose strides are 0."""
    x, w = (m.requires_grad_() for m in matrices((6, 24), (40, 24)))
    OneDnnMatmul.apply(x, w, None).sum().backward()
    close(x.grad, w.detach().double().sum(dim=0).expand(6, -1))
    close(w.grad, x.detach().double().sum(dim=0).expand(40, -1))


def test_no_rows_give_no_rows():
    assert matmul_transposed(torch.zeros(0, 24), torch.zeros(40, 24)).shape == (0, 40)


def test_where_mkl_is_faster_products_are_torchs_own(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "FASTER_THAN_MKL", False)
    layer = nn.Linear(24, 40)
    use_onednn(layer)
    (x,) = matrices((3, 24))
    found = layer(x)
    assert type(found.grad_fn).__name__ == "AddmmBackward0"
    assert torch.equal(found, nn.functional.linear(x, *layer.parameters()))


def test_other_float_types_are_left_to_torch():
    layer = nn.Linear(24, 40, dtype=torch.float64)
    use_onednn(layer)
    (x,) = matrices((3, 24))
    assert torch.equal(layer(x.double()), nn.functional.linear(x.double(), *layer.parameters()))


def test_a_model_keeps_its_weights_names_and_ties():
    model = tiny_llama(50, 3)
    names = list(model.state_dict())
    use_onednn(model)
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert type(twin.lm_head) is OneDnnLinear
    assert isinstance(twin.lm_head, nn.Linear)
