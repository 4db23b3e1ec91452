"""A backend that `auto` finds is tried on two layers first; through the stand-in, intact and with faults put in."""

import sys
from dataclasses import replace

import pytest
import torch

from megaasync.distributed.rank_group import ALONE
from megaasync.kernels.te_contract import TE, Features
from megaasync.kernels.transformer_engine import TransformerEngineKernels
from megaasync.nn.torch_kernels import TORCH_KERNELS
from megaasync.train import stages
from megaasync.train.kernel_check import difference_of
from tests.support.configs import small_config
from tests.support.te_stand_in import Recorder, make_engine

CPU = torch.device("cpu")
MODEL = small_config(model__qk_norm=True, model__tie_embeddings=True).model


def engine():
    return make_engine(Recorder())[TE]


def kernels_of(module, dtype=torch.float64):
    return TransformerEngineKernels(
        module, reference=TORCH_KERNELS, dtype=dtype, device=CPU, splits_backward=False, fp8="none", features=Features()
    )


def compared(module, model=MODEL):
    return difference_of(kernels_of(module), TORCH_KERNELS, model, dtype=torch.float64, device=CPU, is_fp8=False)


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, moe=None)], ids=["experts", "dense"])
def test_a_backend_that_is_right_passes(model):
    assert compared(engine(), model) is None


def scaled(name, factor):
    def put_in(module):
        right = getattr(module, name)
        if isinstance(right, type):
            forward = right.forward
            right.forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs) * factor
        else:
            setattr(module, name, lambda **given: right(**given) * factor)

    return put_in


FAULTS = {
    "attention": scaled("DotProductAttention", 1.01),
    "norms": scaled("RMSNorm", 1.01),
    "expert products": scaled("GroupedLinear", 1.01),
    "weighted sum": scaled("moe_unpermute", 0.99),
    "not a number": scaled("Linear", float("nan")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_backend_that_is_wrong_is_named_by_its_worst_number(fault):
    module = engine()
    FAULTS[fault](module)
    words = compared(module)
    assert words is not None and "differs from torch's by " in words and "1e-08 is allowed" in words


def test_auto_goes_on_with_torch_where_the_check_fails(monkeypatch):
    """A wrong number and an exception; `te`, which was asked for, is not checked."""
    config, module, said = small_config(), engine(), []
    found = kernels_of(module)
    monkeypatch.setattr(stages, "choose_kernels", lambda *_, **__: found)
    how = {"device": CPU, "splits_backward": False, "notify": said.append}
    assert stages.agreed_kernels(replace(config, kernels="auto"), ALONE, **how) is found and said == []
    module.RMSNorm.forward = None
    for name in ("auto", "te"):
        chosen = stages.agreed_kernels(replace(config, kernels=name), ALONE, **how)
        assert chosen is (TORCH_KERNELS if name == "auto" else found)
    (line,) = said
    assert line.startswith("kernels=te does not pass its check on two layers: it ends with TypeError: ")
    assert line.endswith("; going on with kernels=torch") and "Traceback" not in line


def test_the_check_leaves_no_trace():
    before = torch.get_default_dtype(), torch.get_rng_state()
    compared(engine())
    assert torch.get_default_dtype() is before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert "transformer_engine" not in sys.modules
