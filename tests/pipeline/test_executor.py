"""The executor on real ranks: masks, numbers that are not finite, stops, precision, buffers."""

import functools
import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch

from megaasync.config.pipeline import phases_of
from megaasync.data.microbatches import Microbatch
from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.entry.spawn import RankFailed, spawn_ranks
from megaasync.optim.sharded_reducer import sum_of_squares
from megaasync.pipeline import TrainingError
from megaasync.schedules import COMPUTE_OPS, Op
from megaasync.train.build import build_trainer
from tests.support.configs import small_config
from tests.support.runs import RunNumbers, run
from tests.support.tiers import slow_params

ALONE = RankEnvironment(0, 1, 0, 1, "")


def build(environment, config):
    device = torch.device("cpu")
    join_group(environment, device=device, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    return build_trainer(
        config, environment=environment, prepared=PreparedData(None, None, None), device=device, observer=RunNumbers()
    )


def update_of(executor):
    """The updating half of the only stage of a rank."""
    (stage,) = executor.runner.stages.values()
    return stage


class Masked:
    """A source in which microbatches have very different numbers of valid tokens, one of them none."""

    def __init__(self, source, num_microbatches):
        self._source, self._m = source, num_microbatches

    def get(self, step, microbatch):
        given = self._source.get(step, microbatch)
        mask = torch.zeros_like(given.mask_BS)
        valid = (0, 1, 15, 7)[(step + microbatch) % 4]
        mask.view(-1)[:valid] = True
        return Microbatch(given.tokens_BS, given.labels_BS, mask)


def masked_rank(environment, config):
    trainer = build(environment, config)
    executor = trainer.executor
    executor._source = Masked(executor._source, config.num_microbatches)
    results = list(executor.run(*phases_of(config), 0, config.train.steps, flush=True))
    leave_group()
    return [(r.loss, r.grad_norm, r.tokens) for r in results]


def test_the_divisor_is_the_global_batchs_valid_tokens():
    """Sum over sum, however the batch is cut into microbatches and stages; an empty microbatch counts nothing."""

    def numbers(**overrides):
        config = small_config("sgd", train__steps=5, **overrides)
        return spawn_ranks(masked_rank, (config,), world_size=config.world_size)

    (one,) = numbers()
    two = numbers(parallel__pipeline=2)
    assert [tokens for _, _, tokens in one] == [23] * 5
    assert two[0] == two[1]
    np.testing.assert_allclose(two[0], one, rtol=1e-9)
    # and by hand: the first batch's loss
    config = small_config("sgd", train__steps=1)
    executor = build(ALONE, config).executor
    source = Masked(executor._source, 4)
    module = executor.stages[0].versions.module(0)
    total = sum(module(None, source.get(0, i)).item() for i in range(4))
    assert one[0][0] == pytest.approx(total / 23, rel=1e-9)


def test_the_float32_norm_is_exact_for_many_elements():
    """A single float32 sum over 10 million squares is off by 4e-4; 1e-4 is promised."""
    gradient = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    exact = gradient.double().square().sum().item()
    assert sum_of_squares(gradient).item() == pytest.approx(exact, rel=1e-7)


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
        kept=(0, 3, 6, 8, 11, 13, 16, 18, 20),
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


def failing_rank(environment, config):
    trainer = build(environment, config)
    if environment.rank == 1:
        stage = update_of(trainer.executor)
        step = stage.step

        def fail(number, **how):
            if number == 3:
                raise ZeroDivisionError("deliberate")
            step(number, **how)

        stage.step = fail
    trainer.train()


def test_an_exception_on_one_rank_names_the_action_and_ends_the_others():
    with pytest.raises(RankFailed, match=r"ZeroDivisionError: deliberate.*rank 1 was at 1S3 of schedule 2bw"):
        spawn_ranks(failing_rank, (small_config(parallel__pipeline=2),), world_size=2)


def failing_reduction_rank(environment, config):
    trainer = build(environment, config)
    if environment.rank == 1:

        def fail(step):
            if step == 3:
                raise ZeroDivisionError("deliberate")

        stage = update_of(trainer.executor)
        stage.reduce = fail
    trainer.train()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_reduction_is_never_summed(overlap):
    """Not even when it fails in the background, where nobody waits for it."""
    config = small_config(parallel__pipeline=2, schedule__overlap_step=overlap, parallel__timeout_seconds=10.0)
    with pytest.raises(RankFailed, match="ZeroDivisionError: deliberate.*rank 1 was at"):
        spawn_ranks(failing_reduction_rank, (config,), world_size=2)


def hanging_rank(environment, config, dies):
    trainer = build(environment, config)
    if environment.rank == 1:
        backward = trainer.executor.stages[0].backward

        def hang(key, grad, *, version):
            if key == (2, 1):
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(20)
            return backward(key, grad, version=version)

        trainer.executor.stages[0].backward = hang
    trainer.train()


def test_a_hung_rank_is_named_with_what_was_waited_for():
    config = small_config(parallel__pipeline=3, parallel__timeout_seconds=2.0)
    start = time.monotonic()
    wanted = (  # by either neighbour, whoever is first
        r"rank (0, stage 0|2, stage 2), step 3, microbatch \d: waited for the (gradient for its backward|input of its "
        r"forward) from rank 1 \(stage 1\), and nothing came for 2 s: it hangs .* parallel.timeout_seconds"
    )
    with pytest.raises(RankFailed, match=wanted):
        spawn_ranks(hanging_rank, (config, False), world_size=3)
    assert time.monotonic() - start < 15


def test_a_killed_rank_is_named():
    names = ["a", "rank 1 (stage 1)", "c"]
    with pytest.raises(RankFailed, match=r"rank 1 \(stage 1\) died without a word \(exit code -9\)"):
        spawn_ranks(hanging_rank, (small_config(parallel__pipeline=3), True), world_size=3, names=names)


def overlapping_rank(environment, config):
    """A run whose STEP takes long; what the recorder saw."""
    trainer = build(environment, config)
    compute, update = trainer.executor.stages[0], update_of(trainer.executor)
    step, forward = update.step, compute.forward

    def slow_step(number, **arguments):
        time.sleep(0.03)
        step(number, **arguments)

    def slow_forward(key, x, microbatch, *, version):
        time.sleep(0.01)
        return forward(key, x, microbatch, version=version)

    update.step, compute.forward = slow_step, slow_forward
    outcome = trainer.train()
    leave_group()
    return outcome.timeline.spans


def test_forwards_and_backwards_go_on_during_a_step():
    spans = spawn_ranks(overlapping_rank, (small_config(parallel__pipeline=2, train__steps=10),), world_size=2)[0]
    for rank in (0, 1):
        mine = [s for s in spans if s.rank == rank]
        for step in (s for s in mine if s.action.op is Op.STEP and 2 <= s.action.step <= 6):
            assert step.beside
            under = [s for s in mine if s.action.op in COMPUTE_OPS and s.start < step.end and s.end > step.start]
            assert len(under) >= 2, f"rank {rank} did nothing during {step.action}"


COMPUTE_CALLS = ("forward", "backward", "take_sums", "evaluate")
UPDATE_CALLS = ("reduce", "squares", "routing_stats", "step")


def watched_rank(environment, config):
    """The threads that enter each half of a stage, by method."""
    trainer = build(environment, config)
    halves = [(trainer.executor.stages[0], COMPUTE_CALLS), (update_of(trainer.executor), UPDATE_CALLS)]
    seen = {}

    def watch(half, name):
        original = getattr(half, name)

        def watched(*args, **kwargs):
            seen.setdefault(name, set()).add(threading.current_thread().name)
            return original(*args, **kwargs)

        setattr(half, name, watched)

    for half, names in halves:
        for name in names:
            watch(half, name)
    for _ in trainer.executor.run(*phases_of(config), 0, config.train.steps):  # nothing is flushed
        pass
    trainer._evaluate(config.train.steps, *phases_of(config))
    leave_group()
    return seen


@pytest.mark.parametrize("overlap", [True, False])
def test_each_half_of_a_stage_has_its_thread(overlap):
    """Under overlap the updating half is entered from the background only; the computing half never is."""
    config = small_config(parallel__pipeline=2, schedule__overlap_step=overlap)
    for seen in spawn_ranks(watched_rank, (config,), world_size=2):
        assert all(seen[name] == {"MainThread"} for name in COMPUTE_CALLS)
        stepping = {"background"} if overlap else {"MainThread"}
        assert seen["reduce"] == seen["step"] == stepping
        assert seen["squares"] == seen["routing_stats"] == {"background"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_keeps_its_gradients_and_masters_in_float32(optimizer):
    """Norms within 2 % of float32's over five steps, the same on one and two stages; masters are float32."""

    def numbers(dtype, stages=1, **overrides):
        return run(
            small_config(
                optimizer,
                train__dtype=dtype,
                parallel__pipeline=stages,
                train__steps=5,
                optimizer__lr=1e-3,
                model__moe=None,
                **overrides,
            )
        )

    exact, half, half_on_two = numbers("float32"), numbers("bfloat16"), numbers("bfloat16", 2)
    split = numbers("bfloat16", 2, schedule__name="zb_h1")
    whole = numbers("bfloat16", 2, schedule__name="1f1b")
    np.testing.assert_allclose(split.column("grad_norm"), whole.column("grad_norm"), rtol=0.01)
    np.testing.assert_allclose(half.column("grad_norm"), exact.column("grad_norm"), rtol=0.02)
    np.testing.assert_allclose(half.column("loss"), half_on_two.column("loss"), rtol=1e-6)
    assert all(weight.dtype == np.float32 for weight in half.weights.values())
    moved = half.weights["layers.1.attention.query.weight"]
    start = numbers_at_start("bfloat16")
    assert 0 < np.abs(moved - start).max() < 0.05


def numbers_at_start(dtype):
    stage = update_of(build(ALONE, small_config(train__dtype=dtype, model__moe=None)).executor)
    index = stage.optimizer.layout.names.index("layers.1.attention.query.weight")
    return stage.optimizer.layout.views(stage.master)[index].numpy()


def test_bfloat16_masters_start_from_the_draw_and_not_from_its_rounding():
    """Else every layout's first updates would carry an error of half a bfloat16 step."""
    stage, exact = (
        update_of(build(ALONE, small_config(train__dtype=dtype)).executor) for dtype in ("bfloat16", "float32")
    )
    assert torch.equal(stage.whole_master(), exact.whole_master())
    assert torch.equal(stage.versions.flat(0), exact.whole_master().to(torch.bfloat16))
    assert not torch.equal(stage.whole_master(), exact.whole_master().to(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_over_gives_its_memory_back(dtype):
    """Hooks of parameters hold the gradient sums; a circle through them could never be collected."""
    trainer = build(ALONE, small_config(train__dtype=dtype, train__steps=3))
    trainer.train()
    stage = trainer.executor.stages[0]
    held = [weakref.ref(one) for one in (stage.gradients, stage.versions.module(0), stage.gradients.sum_of(0))]
    del trainer, stage
    gc.collect()
    assert [one() for one in held] == [None] * 3


def test_float32_stays_near_float64_for_a_dense_model():
    """float32 within 1e-4 over 20 steps for dense models, on two stages against one."""

    def numbers(stages):
        return run(small_config("adamw", train__dtype="float32", parallel__pipeline=stages, model__moe=None))

    one, two = numbers(1), numbers(2)
    np.testing.assert_allclose(one.column("loss"), two.column("loss"), rtol=1e-4)


@pytest.mark.slow("engine")
def test_training_learns_the_chain_towards_its_entropy():
    """The synthetic source's best loss is known: training comes close to it and never below."""
    config = small_config(
        "muon", train__steps=150, train__dtype="float32", data__num_tokens=60000, train__global_batch_size=16
    )
    numbers = run(config)
    from megaasync.data.synthetic import MarkovSource

    entropy = MarkovSource(vocab_size=64, branching=3, seed=config.train.seed).entropy
    assert entropy < numbers.val_loss < entropy + 0.35
    assert numbers.column("loss")[0] > 4
