"""How each parameter lies over the ranks: which dimension is split over which axis, and whose gradients are summed.

A table by name, as the routing of the optimizer is; `models/transformer.py` makes the shards that it describes.
"""

from megaasync.distributed.sharding import Sharding

# Axes over which gradients are summed, of all kinds of parameters.
_DENSE, _OF_A_PART, _EXPERTS = ("data", "expert"), ("data", "expert", "tensor"), ("data", "tensor")
REDUCTIONS = (_DENSE, _OF_A_PART, _EXPERTS)

_COLUMN = (
    "embedding.weight",
    "head.weight",
    "attention.query.weight",
    "attention.key.weight",
    "attention.value.weight",
    "mlp.gate.weight",
    "mlp.up.weight",
    "shared.gate.weight",
    "shared.up.weight",
)
_ROW = ("attention.output.weight", "mlp.down.weight", "shared.down.weight")


def sharding_of(name: str, *, sequence_parallel: bool) -> Sharding:
    """The sharding of a parameter, by its name in the whole model.

    A router sees its tensor-parallel rank's part of the tokens, as the experts do; norms do so under sequence
    parallelism only.
    """
    if ".experts." in name:
        return Sharding("expert", 0, _EXPERTS)
    if name.endswith(_COLUMN):
        return Sharding("tensor", 0, _DENSE)
    if name.endswith(_ROW):
        return Sharding("tensor", 1, _DENSE)
    if ".router." in name or (name.endswith("norm.weight") and sequence_parallel):
        return Sharding(None, 0, _OF_A_PART)
    if name.endswith("norm.weight"):
        return Sharding(None, 0, _DENSE)
    raise ValueError(f"parameter {name}: models/sharding.py does not say how it lies over the ranks")
