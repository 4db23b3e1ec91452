"""Optimizers of other libraries through the adapter: equal to ours, or to themselves on plain parameters."""

import numpy as np
import pytest
import torch

from megaasync.config import ConfigError
from megaasync.update_rules.torch_optimizer import make_optimizer, torch_optimizer_rule
from tests.support.configs import small_config
from tests.support.trajectories import LR, MATRICES, STEPS, gradients, ours, random_tensors


def adapted(target, elementwise=True, **arguments):
    return small_config(
        "torch", optimizer__target=target, optimizer__elementwise=elementwise, optimizer__arguments=arguments
    )


def assert_same(mine, expected, names, atol):
    for step in (0, 1, 9, STEPS - 1):
        for name in names:
            np.testing.assert_allclose(mine[step][name], expected[step][name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("target", "arguments", "own"),
    [
        ("torch.optim.AdamW", {"betas": [0.9, 0.95]}, "adamw"),
        ("torch.optim.AdamW", {"betas": [0.9, 0.95], "fused": True}, "adamw"),
        ("pytorch_optimizer.Lion", {"betas": [0.9, 0.99]}, "lion"),
        ("pytorch_optimizer.Adan", {"betas": [0.98, 0.92, 0.99]}, "adan"),
    ],
)
@pytest.mark.parametrize("error_feedback", [False, True])
def test_equals_our_own(target, arguments, own, error_feedback):
    config = small_config(own, optimizer__weight_decay=0.1)
    mine = ours(adapted(target, **arguments), error_feedback=error_feedback)
    assert_same(mine, ours(config, error_feedback=error_feedback), mine[0], 1e-9)


@pytest.mark.parametrize(
    "target", ["pytorch_optimizer.MARS", "torch.optim.Muon", "torch.optim.Adafactor", "torch.optim.RAdam"]
)
def test_moves_a_matrix_as_the_class_does_by_itself(target):
    """Adafactor's step depends on the weights, and its states are vectors."""
    config = adapted(target, elementwise=False)
    rule = torch_optimizer_rule(target, {}, is_matrix_rule=True)
    assert rule.sees_weights == (target == "torch.optim.Adafactor")
    mine, starts = ours(config), random_tensors(7)
    for name in (MATRICES[0], MATRICES[2]):
        parts = list(starts[name]) if starts[name].dim() == 3 else [starts[name]]
        parameters = [torch.nn.Parameter(part.clone(), requires_grad=False) for part in parts]
        optimizer = make_optimizer(rule.factory, {}, parameters, lr=LR)
        for step in range(STEPS):
            grads = gradients(step)[name]
            for parameter, grad in zip(parameters, grads if grads.dim() == 3 else [grads], strict=True):
                parameter.grad = grad.clone()
            before = [parameter.clone() for parameter in parameters]
            optimizer.step()
            for parameter, its in zip(parameters, before, strict=True):
                parameter.sub_(its, alpha=LR * config.optimizer.weight_decay)
        # Muon's own Newton-Schulz works in bfloat16, which decides the last bits by the weights' rounding no more
        np.testing.assert_allclose(
            mine[-1][name].numpy(), torch.stack(list(parameters)).view(starts[name].shape).numpy(), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("argument", ["fused", "capturable"])
def test_counts_are_where_a_gpu_s_kernel_reads_them(argument):
    """The trial, on a CPU, does without the argument; meta stands for a GPU here."""
    for given, device in (({argument: True}, "meta"), ({}, "cpu")):
        rule = torch_optimizer_rule("torch.optim.AdamW", given, is_matrix_rule=False)
        parameter = torch.nn.Parameter(torch.zeros(3, device="meta"), requires_grad=False)
        optimizer = torch.optim.AdamW([parameter])
        optimizer.defaults.update(given)
        rule._put_in(optimizer, [parameter], rule.init(parameter), 4)
        count = optimizer.state[parameter]["step"]
        assert count.device.type == device and count.dtype is torch.float32
        assert device == "meta" or count.item() == 3


def test_a_class_without_the_argument_is_named():
    with pytest.raises(ConfigError, match=r"optimizer.arguments.fused=True: torch.optim.Rprop takes no fused; leave"):
        torch_optimizer_rule("torch.optim.Rprop", {"fused": True}, is_matrix_rule=False)


def test_arguments_are_names_and_values():
    with pytest.raises(ConfigError, match="optimizer.arguments=3: expected names and values"):
        small_config("torch", optimizer__arguments=3)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("torch.optim.Nothing", {}, "optimizer.target=torch.optim.Nothing: not the name of a torch.optim.Optimizer"),
        ("no_such_package.Muon", {}, "optimizer.target=no_such_package.Muon: No module named"),
        ("RMSprop", {}, "optimizer.target=RMSprop: not the name"),
        ("torch.optim.RMSprop", {"lr": 0.1}, "optimizer.arguments.lr=0.1: set optimizer.lr"),
        ("torch.optim.RMSprop", {"alfa": 0.1}, "a trial with optimizer.arguments=.*alfa.* failed"),
        ("pytorch_optimizer.SOAP", {}, "keeps 'GG'"),
        ("torch.optim.LBFGS", {}, "a trial with"),
        ("pytorch_optimizer.Prodigy", {}, "changes its setting"),
        ("torch.optim.Adafactor", {}, "is not elementwise; set optimizer.elementwise=false"),
        ("pytorch_optimizer.Adan", {"max_grad_norm": 0.1}, "is not elementwise"),
    ],
)
def test_what_cannot_be_adapted_is_named(target, arguments, message):
    with pytest.raises(ConfigError, match=message):
        torch_optimizer_rule(target, arguments, is_matrix_rule="elementwise" not in message)
