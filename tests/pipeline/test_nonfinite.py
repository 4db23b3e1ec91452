"""Numbers that are not finite: seen by all ranks in their step, never applied, skipped where that is asked for."""

import pytest

from megaasync.config.pipeline import phases_of
from megaasync.distributed.groups import leave_group
from megaasync.entry.spawn import spawn_ranks
from megaasync.pipeline import TrainingError
from tests.support.configs import small_config
from tests.support.engine import build


def poisoned_rank(environment, config, rank, at, microbatch=1):
    trainer = build(environment, config)
    executor = trainer.executor
    if environment.rank == rank:
        name = "backward_input" if phases_of(config)[0].schedule.splits_backward else "backward"
        backward = getattr(executor.stages[0], name)

        def poisoned(key, grad, *, version):
            x_grad = backward(key, grad, version=version)
            if key == (at, microbatch):  # as a fault in one microbatch's kernel would
                executor.stages[0].gradients.sum_of(at)[0] = float("nan")
            return x_grad

        setattr(executor.stages[0], name, poisoned)
    seen = []
    with pytest.raises(TrainingError, match=f"step {at + 1}: .* not both finite"):
        for result in executor.run(*phases_of(config), 0, config.train.steps):
            seen.append(result.step)
    halves = executor.runner.stages.values()
    (updates,) = {stage.num_updates for stage in halves}
    finite = all(stage.master.isfinite().all() for stage in halves)
    leave_group()
    return seen, updates, finite


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
@pytest.mark.parametrize("at", [0, 4])
def test_the_row_of_a_poisoned_last_step_is_written(schedule, at):
    """The last batch of a segment has its norm looked at after the pipeline is empty."""
    config = small_config(schedule__name=schedule, parallel__pipeline=2, train__steps=at + 1)
    for seen, updates, _ in spawn_ranks(poisoned_rank, (config, 1, at), world_size=2):
        assert seen == list(range(at + 1))
        assert updates <= at


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "interleaved_2bw", "wpipe", "zb_h1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_one_rank_is_seen_by_all_in_its_step_and_never_applied(schedule, rank):
    config = small_config(schedule__name=schedule, parallel__pipeline=2, train__global_batch_size=8)
    both = spawn_ranks(poisoned_rank, (config, rank, 5), world_size=2)
    for seen, updates, finite in both:
        assert seen == list(range(6))
        assert updates == 5
        assert finite


def skipping_rank(environment, config, poisoned_steps):
    """Poison the last stage's gradient of some steps; (steps seen, final masters, the error)."""
    executor = build(environment, config).executor
    if environment.rank == config.world_size - 1:
        backward = executor.stages[0].backward

        def poisoned(key, grad, *, version):
            x_grad = backward(key, grad, version=version)
            if key[0] in poisoned_steps and key[1] == 1:
                executor.stages[0].gradients.sum_of(key[0])[0] = float("inf")
            return x_grad

        executor.stages[0].backward = poisoned
    seen, error = [], None
    try:
        for result in executor.run(*phases_of(config), 0, config.train.steps, flush=True):
            seen.append((result.step, result.broken_stages))
    except TrainingError as caught:
        error = str(caught)
    leave_group()
    optimizer = next(iter(executor.runner.stages.values())).optimizer
    return seen, optimizer.master.numpy().copy(), optimizer.num_updates, optimizer.num_skipped, error


@pytest.mark.parametrize(("schedule", "pipeline"), [("1f1b", 1), ("2bw", 2)])
def test_a_skipped_batch_changes_nothing_and_is_not_counted(schedule, pipeline):
    """The last step poisoned: the weights are those of the steps before it, and rules have counted one less."""
    size = {"schedule__name": schedule, "parallel__pipeline": pipeline, "train__lr_schedule": "constant"}
    skip = {**size, "train__on_nonfinite": "skip", "train__max_skipped": 1}
    six, seven = (small_config("adamw", **skip, train__steps=n) for n in (6, 7))
    ranks = spawn_ranks(skipping_rank, (seven, (6,)), world_size=pipeline)
    plain = spawn_ranks(skipping_rank, (six, ()), world_size=pipeline)
    for (seen, master, updates, skipped, error), (_, expected, *_) in zip(ranks, plain, strict=True):
        assert error is None and (updates, skipped) == (7, 1)
        assert seen[-1] == (6, (pipeline - 1,)) and all(not broken for _, broken in seen[:-1])
        assert (master == expected).all()
    more = small_config("adamw", **skip, train__steps=12)
    for seen, _, updates, skipped, error in spawn_ranks(skipping_rank, (more, (3, 8)), world_size=pipeline):
        assert [step for step, _ in seen] == list(range(9)) and (updates, skipped) == (8, 1)
        assert f"gradients of stages {pipeline - 1}" in error and "1 batches were skipped before" in error


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_nan_under_pipedream_is_dropped_where_it_is_and_ends_all_in_its_step(rank):
    """Stages clip and step by themselves, so others have stepped by the time all hear of it."""
    config = small_config(schedule__name="pipedream", parallel__pipeline=3, train__global_batch_size=2, train__steps=12)
    for seen, updates, finite in spawn_ranks(poisoned_rank, (config, rank, 5, 0), world_size=3):
        assert seen == list(range(6))
        assert 5 <= updates <= 8
        assert finite
