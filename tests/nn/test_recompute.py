"""What is made again in the backward, and a loss in chunks, change no number; and the making is counted."""

import pytest
import torch
from torch import nn

from megaasync.data.microbatches import Microbatch
from megaasync.kernels.weight_gradients import WeightGradientQueue, accumulate, attach_queue
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import DecoderStage, TransformerBlock
from megaasync.nn.layer_context import LayerContext
from megaasync.nn.loss import cross_entropy_sum, head_loss
from megaasync.nn.norm import RMSNorm
from megaasync.nn.recompute import Recompute
from megaasync.nn.torch_kernels import TORCH_KERNELS
from tests.support.configs import small_config

MODES = ("none", "selective", "full")


def model_of(config, mode, chunk=None):
    torch.set_default_dtype(torch.float64)
    try:
        model = DecoderStage(
            config,
            range(config.num_layers),
            context=LayerContext(TORCH_KERNELS, Recompute(mode, TORCH_KERNELS.checkpoint), chunk),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    initialize_(dict(model.named_parameters()), config, seed=0)
    return model


def batch_of(config):
    tokens = torch.randint(0, config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    return Microbatch(tokens[:, :-1], tokens[:, 1:], mask)


def numbers(model, batch, *, splits=False):
    """Loss and gradients, through main gradients as in the engine."""
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad = torch.zeros_like(parameter)
    if not splits:
        loss = model(None, batch)
        loss.backward()
        return loss, {name: parameter.grad for name, parameter in model.named_parameters()}
    queue = WeightGradientQueue()
    attach_queue(model, queue)
    loss = model(None, batch)
    with queue.collect() as deferred:
        loss.backward()
    accumulate(deferred)
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("moe", [True, False], ids=["experts", "dense"])
def test_recomputation_changes_no_number(moe, splits):
    config = small_config(
        model__tie_embeddings=True,
        model__moe__sequence_balance_loss=0.1,
        model__moe__z_loss=0.1,
        **({} if moe else {"model__moe": None}),
    ).model
    batch = batch_of(config)
    loss, gradients = numbers(model_of(config, "none"), batch)
    for mode in MODES:
        again, theirs = numbers(model_of(config, mode), batch, splits=splits)
        assert again == loss, mode
        for name, gradient in gradients.items():
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-12, atol=1e-14, msg=f"{mode} {name}")


@pytest.mark.parametrize(("mode", "norms", "layers"), [("none", 9, 4), ("selective", 14, 4), ("full", 17, 8)])
def test_forwards_are_counted(monkeypatch, mode, norms, layers):
    """Four layers with two norms each, and the last norm. Of the experts' three, routers keep the output."""
    config = small_config().model
    model, counts = model_of(config, mode), {RMSNorm: 0, TransformerBlock: 0}
    for kind in counts:
        original = kind.forward

        def counted(self, *args, kind=kind, original=original):
            counts[kind] += 1
            return original(self, *args)

        monkeypatch.setattr(kind, "forward", counted)
    loss = model(None, batch_of(config))
    assert counts == {RMSNorm: 9, TransformerBlock: 4}
    loss.backward()
    assert sum(layer._is_moe for layer in model.layers.values()) == 3
    assert counts == {RMSNorm: norms, TransformerBlock: layers}


def test_less_is_kept():
    """Bytes that autograd holds after the forward, by the storages still alive."""
    config = small_config(model__moe=None, model__ffn_hidden_size=64).model
    held = {}
    for mode in MODES:
        model, batch, storages = model_of(config, mode), batch_of(config), {}

        def watch(module, args, output, storages=storages):
            storages[id(output)] = torch.multiprocessing.reductions.StorageWeakRef(output.untyped_storage())

        for module in model.modules():
            if not isinstance(module, nn.ModuleDict) and module is not model:
                module.register_forward_hook(watch)
        loss = model(None, batch)
        held[mode] = sum(not storage.expired() for storage in storages.values())
        loss.backward()
    assert held["full"] < held["selective"] < held["none"]


def test_nothing_is_kept_to_be_made_again_without_gradients(monkeypatch):
    config, calls = small_config(model__moe=None).model, []
    monkeypatch.setattr(type(TORCH_KERNELS), "checkpoint", lambda *args: calls.append(args) or args[1](*args[2:]))
    model = model_of(config, "full")
    with torch.no_grad():
        model(None, batch_of(config))
    assert calls == []
    model(None, batch_of(config))
    assert len(calls) == config.num_layers


def test_a_view_in_another_order_is_kept_as_it_is():
    """It has the address and the size of what can be made again, and other contents."""
    recompute, x = Recompute("selective"), torch.arange(6.0, requires_grad=True)
    made = (x * 2).view(2, 3)
    with recompute.recompute_in_backward(made, lambda: (x.detach() * 2).view(2, 3)):
        y = (made.T * made.T.detach()).sum() + made.square().sum()
    (grad,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(grad, 3 * 4 * x.detach())


@pytest.mark.parametrize("chunk", [1, 3, 5, 16, 100, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_loss_in_chunks_is_the_loss(chunk, dtype):
    """Loss and both gradients against torch's cross entropy of all logits; a masked token adds nothing."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 8, 6), (11, 6)))
    labels = torch.randint(0, 11, (2, 8), generator=generator)
    mask = torch.rand(2, 8, generator=generator) < 0.7
    x, weight = (item.to(dtype).requires_grad_() for item in (x, weight))
    wide = [item.detach().double().requires_grad_() for item in (x, weight)]
    expected = 2 * cross_entropy_sum(wide[0] @ wide[1].T, labels, mask)
    expected.backward()
    loss = 2 * head_loss(x, weight, labels, mask, vocab_size=11, context=LayerContext(loss_chunk_tokens=chunk))
    loss.backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=0)
    for ours, theirs in zip((x, weight), wide, strict=True):
        largest = theirs.grad.abs().max()
        torch.testing.assert_close(ours.grad.double() / largest, theirs.grad / largest, rtol=0, atol=tolerance)
    assert (
        head_loss(
            x, weight, labels, torch.zeros_like(mask), vocab_size=11, context=LayerContext(loss_chunk_tokens=chunk)
        )
        == 0
    )


def test_no_more_than_a_chunk_of_logits_is_ever_held(monkeypatch):
    """The largest tensor that the loss makes has a chunk's rows."""
    largest = [0]

    class HangDetector(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for item in result if isinstance(result, tuple | list) else (result,):
                if isinstance(item, torch.Tensor) and item.shape[-1:] == (101,):
                    largest[0] = max(largest[0], item.shape[0])
            return result

    x, weight = torch.randn(2, 32, 6, requires_grad=True), torch.randn(101, 6, requires_grad=True)
    labels, mask = torch.randint(0, 101, (2, 32)), torch.ones(2, 32, dtype=torch.bool)
    with HangDetector():
        head_loss(x, weight, labels, mask, vocab_size=101, context=LayerContext(loss_chunk_tokens=8)).backward()
    assert largest[0] == 8
