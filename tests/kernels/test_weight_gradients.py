"""A split backward gives the gradients of a whole one: inputs in the first half, weights in the second."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megaasync.data.microbatches import Microbatch
from megaasync.kernels.grouped_linear import grouped_linear_loop, grouped_product
from megaasync.kernels.weight_gradients import (
    WeightGradientQueue,
    accumulate,
    attach_queue,
    embedding,
    expert_linear,
    linear,
)
from megaasync.models.initialize import initialize_
from megaasync.models.parameters import roles_of
from megaasync.models.transformer import DecoderStage
from megaasync.optim.flat_param_layout import FlatParamLayout
from megaasync.optim.routing import route_parameters
from megaasync.pipeline.gradients import GradientBuffers
from tests.support.configs import small_config


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def split(output, grad, queue):
    """The two halves; returns what the first half left."""
    with queue.collect() as deferred:
        torch.autograd.backward(output, grad)
    return deferred


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_a_linear_layer_splits(shape):
    x, weight = random(*shape).requires_grad_(), random(6, 8, seed=1).requires_grad_()
    grad = random(*shape[:-1], 6, seed=2)
    F.linear(x, weight).backward(grad)
    whole = x.grad, weight.grad
    x2, weight2, queue = x.detach().requires_grad_(), weight.detach().requires_grad_(), WeightGradientQueue()
    deferred = split(linear(x2, weight2, queue), grad, queue)
    torch.testing.assert_close(x2.grad, whole[0], rtol=1e-12, atol=1e-12)
    assert weight2.grad is None and len(deferred) == 1
    accumulate(deferred)
    torch.testing.assert_close(weight2.grad, whole[1], rtol=1e-12, atol=1e-12)


def test_outside_a_collection_a_layer_with_a_queue_is_ordinary():
    x, weight, queue = random(5, 8).requires_grad_(), random(6, 8, seed=1).requires_grad_(), WeightGradientQueue()
    linear(x, weight, queue).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(6, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 7, 0], [0, 0, 0, 10], [1, 2, 3, 4]])
def test_grouped_layers_split(dtype, counts):
    x, weight = random(10, 8, dtype=dtype).requires_grad_(), random(4, 16, 8, dtype=dtype, seed=1).requires_grad_()
    counts, grad = torch.tensor(counts), random(10, 16, dtype=dtype, seed=2)
    grouped_linear_loop(x, weight, counts).backward(grad)
    x2, weight2, queue = x.detach().requires_grad_(), weight.detach().requires_grad_(), WeightGradientQueue()
    deferred = split(expert_linear(x2, weight2, counts, queue), grad, queue)
    assert weight2.grad is None
    accumulate(deferred)
    torch.testing.assert_close(x2.grad, x.grad)
    torch.testing.assert_close(weight2.grad, weight.grad)


def test_an_empty_group_s_gradient_is_zero_whatever_the_kernel_leaves(monkeypatch):
    """On some GPUs it leaves what was in memory."""
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, offs: torch.full((2, a.shape[0], b.shape[1]), torch.nan))
    gradient = grouped_product(torch.randn(8, 16), torch.randn(8, 16), torch.tensor([8, 0]))
    assert gradient[0].isnan().all() and not gradient[1].any()


def test_a_sum_goes_on_when_its_step_comes_again():
    config = small_config(model__moe=None)
    modules = [DecoderStage(config.model, range(4)) for _ in range(2)]
    shapes = {name: tuple(parameter.shape) for name, parameter in modules[0].named_parameters()}
    layout = FlatParamLayout(shapes, route_parameters(roles_of(shapes), config.optimizer))
    sums = GradientBuffers(modules, layout, num_buffers=2, dtype=torch.float32)
    sums.attach(modules[0], 0)
    next(modules[0].parameters()).main_grad.add_(1.0)
    sums.attach(modules[1], 1)
    sums.attach(modules[0], 0)
    assert sums.sum_of(0).any() and not sums.sum_of(1).any()
    sums.attach(modules[0], 2)
    assert not sums.sum_of(2).any()


def test_no_rows_give_zero_weight_gradients():
    gradient = grouped_product(torch.zeros(0, 16), torch.zeros(0, 8), torch.zeros(4, dtype=torch.int64))
    assert gradient.shape == (4, 16, 8) and not gradient.any()


def test_gradients_accumulate_in_place_into_a_flat_buffer():
    buffer = torch.ones(48, dtype=torch.float64)
    weight, queue = nn.Parameter(random(6, 8)), WeightGradientQueue()
    weight.grad = buffer.view(6, 8)
    accumulate(split(linear(random(5, 8, seed=3), weight, queue), random(5, 6, seed=4), queue))
    expected = 1 + random(5, 6, seed=4).T @ random(5, 8, seed=3)
    torch.testing.assert_close(buffer.view(6, 8), expected)


def test_a_whole_model_splits_and_its_matrices_wait():
    """Every linear layer and every expert matrix waits; embedding, norms, router and head do not."""
    config = small_config(model__tie_embeddings=True).model
    torch.set_default_dtype(torch.float64)
    model, twin = (DecoderStage(config, range(config.num_layers)) for _ in range(2))
    torch.set_default_dtype(torch.float32)
    for item in (model, twin):
        initialize_(dict(item.named_parameters()), config, seed=0)
    tokens = torch.randint(0, config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = Microbatch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 8, dtype=torch.bool))
    model(None, batch).backward()
    queue = WeightGradientQueue()
    attach_queue(twin, queue)
    deferred = split(twin(None, batch), None, queue)
    matrices = 0
    for name, parameter in twin.named_parameters():
        waits = parameter.dim() >= 2 and "router" not in name and "embedding" not in name
        matrices += waits
        assert (parameter.grad is None) == waits, name
    assert len(deferred) == matrices
    accumulate(deferred)
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_an_embeddings_gradient_is_summed_in_float32():
    """Four thousand ones, as of a frequent token: a bfloat16 sum stays at 256."""
    weight = random(7, 3, dtype=torch.bfloat16).requires_grad_()
    rows = torch.full((4, 1024), 5)
    ones = torch.ones(4, 1024, 3, dtype=torch.bfloat16)
    embedding(rows, weight).backward(ones)
    assert weight.grad[5].tolist() == [4096.0] * 3 and weight.grad.count_nonzero() == 3
    weight.grad, weight.main_grad = None, torch.ones(7, 3)
    embedding(rows, weight).backward(ones)
    assert weight.main_grad[5].tolist() == [4097.0] * 3 and weight.main_grad.sum() == 7 * 3 + 3 * 4096
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("has_sum", [False, True])
def test_an_embedding_is_torchs(dtype, has_sum):
    rows = torch.randint(0, 11, (3, 40), generator=torch.Generator().manual_seed(4))
    weight, grad = random(11, 5, dtype=dtype).requires_grad_(), random(3, 40, 5, dtype=dtype, seed=1)
    expected = F.embedding(rows, weight)
    expected.backward(grad)
    other = weight.detach().clone().requires_grad_()
    if has_sum:
        other.main_grad = torch.zeros(11, 5, dtype=dtype)
    found = embedding(rows, other)
    found.backward(grad)
    assert torch.equal(found, expected)
    torch.testing.assert_close(other.main_grad if has_sum else other.grad, weight.grad)
