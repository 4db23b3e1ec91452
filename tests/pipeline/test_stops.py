"""A stop at any moment ends all ranks after the same step, with what the delay leaves pending left pending."""

import functools

import numpy as np
import pytest

from megaasync.config.pipeline import phases_of
from megaasync.distributed.groups import leave_group
from megaasync.entry.spawn import spawn_ranks
from megaasync.schedules import Op
from tests.support.configs import small_config
from tests.support.engine import ALONE, build
from tests.support.runs import run
from tests.support.tiers import slow_params


def masters_of(executor):
    return {index: stage.master.clone().numpy() for index, stage in executor.runner.stages.items()}


def stopping_rank(environment, config, rank, at):
    trainer = build(environment, config)
    numbers = trainer._observer
    if environment.rank == rank:
        forward = trainer.executor._forward
        count = [0]

        def counting(action):
            count[0] += 1
            if count[0] == at:
                trainer.request_stop()
            forward(action)

        trainer.executor._run[Op.F] = counting
    outcome = trainer.train()
    leave_group()
    return outcome.status, outcome.steps, numbers.column("loss").tolist(), masters_of(trainer.executor)


def unflushed_rank(environment, config, steps):
    executor = build(environment, config).executor
    for _ in executor.run(*phases_of(config), 0, steps):
        pass
    delay = max(phases_of(config)[0].schedule.delay[index] for index in executor.runner.stages)
    assert len(executor.runner._pending) == min(delay, steps), "results pile up"
    leave_group()
    return masters_of(executor)


@functools.cache
def unflushed_masters(schedule, steps):
    """Masters by stage after so many steps, the gradients that the delay leaves pending not applied."""
    parts = spawn_ranks(unflushed_rank, (stopped_config(schedule), steps), world_size=3)
    return {index: master for part in parts for index, master in part.items()}


STOPPED = {"1f1b": 4, "2bw": 4, "interleaved_2bw": 6, "wpipe": 3, "zbv": 4, "pipedream": 1}  # microbatches


def stopped_config(schedule, **overrides):
    return small_config(
        "adamw",
        schedule__name=schedule,
        parallel__pipeline=3,
        model__num_layers=6,
        train__micro_batch_size=1,
        train__global_batch_size=STOPPED[schedule],
        train__steps=8,
        **overrides,
    )


@functools.cache
def uncut_losses(schedule):
    return run(stopped_config(schedule)).column("loss")


STOPS = [
    *[("2bw", *at) for at in ((0, 1), (2, 1), (1, 9), (2, 14), (0, 24), (0, 31), (2, 32))],
    *[("1f1b", *at) for at in ((0, 1), (1, 9), (2, 32))],
    *[(name, *at) for name in ("interleaved_2bw", "wpipe") for at in ((0, 1), (2, 30))],
    ("zbv", 1, 20),
    *[("pipedream", *at) for at in ((0, 1), (1, 4), (2, 5))],
]


EXPOSED_STOPS = [("2bw", 1, 9), ("2bw", 2, 14), ("wpipe", 2, 30)]


@pytest.mark.parametrize(
    ("schedule", "rank", "at", "overlap"),
    slow_params(
        [*((*stop, True) for stop in STOPS), *((*stop, False) for stop in EXPOSED_STOPS)],
        kept=(0, 6, 8, 11, 16, 20),
    ),
)
def test_a_stop_at_any_moment_ends_all_ranks_after_the_same_step(schedule, rank, at, overlap):
    """8 steps, evaluation after the 4th; the stop is asked for at one rank's n-th forward.

    What the delay leaves pending stays so: the weights are those of a run of so many steps that is not flushed.
    """
    config = stopped_config(schedule, train__eval_interval=4, schedule__overlap_step=overlap)
    parts = spawn_ranks(stopping_rank, (config, rank, at), world_size=3)
    assert len({(status, steps, tuple(losses)) for status, steps, losses, _ in parts}) == 1
    for _, steps, _, masters in parts if parts[0][1] < 8 else ():
        for index, master in masters.items():
            np.testing.assert_array_equal(master, unflushed_masters(schedule, steps)[index])
    status, steps, losses, _ = parts[0]
    assert len(losses) == steps
    whole = uncut_losses(schedule)
    np.testing.assert_array_equal(losses, whole[:steps])
    per_step = STOPPED[schedule] * len(phases_of(config)[0].schedule.stages_of(rank))
    asked_in = (at - 1) // per_step
    # the flag goes with the norm of that step at the latest, and is acted on at that step's SYNC
    delay = max(phases_of(config)[0].schedule.delay)
    assert min(asked_in + 1, 8) <= steps <= min(asked_in + 1 + delay, 8)
    assert status == ("interrupted" if steps < 8 else "completed")


@pytest.mark.parametrize("call", [1, 2])
def test_a_stop_in_an_evaluation_acts_in_either_pass(call):
    """Under error feedback an evaluation looks at z and then at x; a cut one leaves no row."""
    config = small_config(correction__name="error_feedback", train__eval_interval=2, train__steps=6)
    trainer = build(ALONE, config)
    evaluator = trainer._evaluator
    loss_at, calls = evaluator._loss_at, []

    def counted(versions):
        calls.append(versions[0])
        if len(calls) == call:
            trainer.request_stop()
        return loss_at(versions)

    evaluator._loss_at = counted
    outcome = trainer.train()
    assert (outcome.status, outcome.steps) == ("interrupted", 2)
    assert calls == [2, 1][:call]  # z in the slot of the next version, then x
    assert [row["kind"] for row in trainer._observer.rows] == ["train", "train"]
