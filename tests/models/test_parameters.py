"""The table of parameters: every name of every model has one line, every line a use, and an unknown name is refused."""

import pytest
import torch

from megaasync.config.parallel_dims import ParallelDims
from megaasync.entry.spawn import RankFailed, spawn_ranks
from megaasync.models import transformer
from megaasync.models.initialize import initialize_
from megaasync.models.parameters import PARAMETERS, parameter_spec, roles_of, sharding_of
from megaasync.models.transformer import TransformerBlock, stage_shapes
from megaasync.optim.routing import Role
from megaasync.plan.plan import make_plan
from tests.support.configs import small_config
from tests.support.runs import run_rank

MODELS = {
    "moe": {},
    "dense": {"model__moe": None},
    "tied": {"model__tie_embeddings": True},
    "query and key norms": {"model__qk_norm": True},
}


def shapes_of(overrides):
    model = small_config(**overrides).model
    return stage_shapes(model, range(model.num_layers))


def test_every_parameter_has_one_line_and_every_line_a_parameter():
    names = {name for overrides in MODELS.values() for name in shapes_of(overrides)}
    assert {parameter_spec(name).pattern for name in names} == {spec.pattern for spec in PARAMETERS}


@pytest.mark.parametrize(
    "name",
    [
        "final_norm.bias",
        "layers.x.attention.query.weight",
        "layers.0.attention.query.weight.extra",
        "attention.query.weight",
        "layers.0.mlp.experts.norm.weight",  # ends as a norm's, and was once taken for one
        "layers.0.attention.value_norm.weight",
    ],
)
def test_a_name_that_no_line_matches_is_refused(name):
    with pytest.raises(ValueError, match=rf"parameter {name}: .*models/parameters.py has no line for it"):
        sharding_of(name, sequence_parallel=False)


def test_a_name_that_two_lines_match_is_refused():
    with pytest.raises(ValueError, match=r"parameter head.weight: .*has 2 lines \(head.weight, head.weight\)"):
        parameter_spec("head.weight", (*PARAMETERS, PARAMETERS[-1]))


class BlockWithGain(TransformerBlock):
    """A block to which somebody has added a parameter, and forgotten its line in the table."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = torch.nn.Parameter(torch.empty(3))


def rank_with_gain(environment, config):
    transformer.TransformerBlock = BlockWithGain
    return run_rank(environment, config)


def test_a_layer_that_is_not_in_the_table_does_not_build(monkeypatch):
    """Neither a plan nor a run begins."""
    config, message = small_config(train__steps=1), r"parameter layers.0.gain: .*give it one"
    with pytest.raises(RankFailed, match=message):
        spawn_ranks(rank_with_gain, (config,), world_size=1)
    monkeypatch.setattr(transformer, "TransformerBlock", BlockWithGain)
    with pytest.raises(ValueError, match=message):
        make_plan(config)


def test_roles_and_thin_matrices():
    shapes = shapes_of({"model__qk_norm": True, "model__num_kv_heads": 1, "model__num_heads": 8})
    roles = roles_of(shapes)
    assert roles["layers.3.attention.key_norm.weight"] is Role.VECTOR
    assert roles["layers.3.attention.key.weight"] is Role.MATRIX
    assert roles_of({"layers.3.attention.key.weight": (1, 16)}) == {"layers.3.attention.key.weight": Role.VECTOR}


def test_parts_of_all_ranks_are_the_whole():
    """Each element of each parameter lies on as many ranks as the axes that do not split it have."""
    layout = ParallelDims(expert=2, tensor=2)
    for name, shape in shapes_of({"model__qk_norm": True}).items():
        counts = torch.zeros(shape)
        for rank in range(4):
            part = sharding_of(name, sequence_parallel=True).local_ranges(shape, layout, rank=rank)
            counts[tuple(slice(item.start, item.stop) for item in part)] += 1
        assert (counts == (4 if parameter_spec(name).axis is None else 2)).all(), name


def test_head_norms_start_as_ones_without_decay():
    shapes = shapes_of({"model__qk_norm": True})
    drawn = {name: torch.empty(shape) for name, shape in shapes.items()}
    initialize_(drawn, small_config(model__qk_norm=True).model, seed=1)
    plain = {name: torch.empty(shape) for name, shape in shapes_of({}).items()}
    initialize_(plain, small_config().model, seed=1)
    for name, weight in drawn.items():
        is_norm = name.endswith(("query_norm.weight", "key_norm.weight"))
        assert torch.equal(weight, torch.ones(4) if is_norm else plain[name]), name
