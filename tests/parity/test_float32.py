"""float32 at other layouts: 1e-4 over 20 steps, with experts up to the first step at which a routing choice differs."""

import numpy as np
import pytest

from megaasync.config.pipeline import phases_of
from megaasync.distributed.groups import leave_group
from megaasync.entry.spawn import spawn_ranks
from tests.parity.test_mesh import DENSE, ODD, config_of
from tests.support.engine import build
from tests.support.tiers import slow_params

STEPS = 20


def routed_rank(environment, config):
    """Losses by step, and how often each expert was chosen, by step and layer of this rank's stages."""
    executor = build(environment, config).executor
    chosen = {}
    for stage in executor.runner.stages.values():
        if stage.balance is None:
            continue
        absorb = stage.balance.absorb

        def noted(step, *, version, stage=stage, absorb=absorb):
            chosen[step, stage.place.index] = stage.balance.counts(step).clone().numpy()
            absorb(step, version=version)

        stage.balance.absorb = noted
    losses = [result.loss for result in executor.run(*phases_of(config), 0, STEPS, flush=True)]
    leave_group()
    return losses, chosen


def choices(parts):
    """Per step, of all layers."""
    found = {key: counts for _, chosen in parts for key, counts in chosen.items()}
    return [np.concatenate([found[key] for key in sorted(found) if key[0] == step]) for step in range(STEPS)]


def first_difference(one, other):
    """The first step (from 0) whose choices differ, or the number of steps."""
    differ = [step for step in range(STEPS) if not np.array_equal(one[step], other[step])]
    return differ[0] if differ else STEPS


@pytest.mark.parametrize(
    ("layout", "sequence_parallel", "base"),
    slow_params([((2, 1, 2, 1), True, DENSE), ((1, 2, 1, 2), False, ODD)], kept=(), area="layouts"),
)
def test_float32_follows_one_rank(layout, sequence_parallel, base):
    def ranks(layout, **arguments):
        config = config_of(layout, steps=STEPS, base=base, train__dtype="float32", **arguments)
        return spawn_ranks(routed_rank, (config,), world_size=config.world_size)

    one, other = ranks((1, 1, 1, 1)), ranks(layout, sequence_parallel=sequence_parallel)
    same = first_difference(choices(one), choices(other)) if base is ODD else STEPS
    print(f"layout {layout}: routing is the same in the first {same} of {STEPS} steps")
    assert same >= 1, "the first step's weights are equal, so its choices are"
    assert one[0][0] != other[0][0], "float32 sums in another order; if they are equal the layout was not used"
    np.testing.assert_allclose(other[0][0][:same], one[0][0][:same], rtol=1e-4)


def test_a_difference_is_found():
    """In the second of three steps."""
    same, changed = np.array([[1, 2]]), np.array([[2, 1]])
    one, other = [same] * STEPS, [same, changed, *[same] * (STEPS - 2)]
    assert first_difference(one, other) == 1
    assert first_difference(one, one) == STEPS
