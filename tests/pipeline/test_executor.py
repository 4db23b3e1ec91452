"""The executor on real ranks: masks, numbers that are not finite, stops, precision, buffers."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from megaasync.config.pipeline import phases_of
from megaasync.data.microbatches import Microbatch
from megaasync.distributed.groups import leave_group
from megaasync.entry.spawn import RankFailed, spawn_ranks
from megaasync.optim.sharded_reducer import sum_of_squares
from megaasync.schedules import COMPUTE_OPS, Op
from tests.support.configs import small_config
from tests.support.engine import ALONE, build, update_of
from tests.support.runs import run


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
    assert time.monotonic() - start < 50  # not the group's own sixty


def test_a_killed_rank_is_named():
    names = ["a", "rank 1 (stage 1)", "c"]
    with pytest.raises(RankFailed, match=r"rank 1 \(stage 1\) died without a word \(exit code -9\)"):
        spawn_ranks(hanging_rank, (small_config(parallel__pipeline=3), True), world_size=3, names=names)


def overlapping_rank(environment, config):
    """A run whose STEP waits, in the middle, until the executor has done two more forwards or backwards; its spans."""
    trainer = build(environment, config)
    compute, update = trainer.executor.stages[0], update_of(trainer.executor)
    step, done = update.step, []

    def counted(name):
        original = getattr(compute, name)

        def count(*args, **kwargs):
            result = original(*args, **kwargs)
            done.append(name)
            return result

        setattr(compute, name, count)

    def slow_step(number, **arguments):
        wanted, end = len(done) + 2, time.monotonic() + 20
        while number in MIDDLE and len(done) < wanted and time.monotonic() < end:
            time.sleep(0.001)
        step(number, **arguments)

    counted("forward")
    counted("backward")
    update.step = slow_step
    outcome = trainer.train()
    leave_group()
    return outcome.timeline.spans


MIDDLE = range(2, 7)


def test_forwards_and_backwards_go_on_during_a_step():
    spans = spawn_ranks(overlapping_rank, (small_config(parallel__pipeline=2, train__steps=10),), world_size=2)[0]
    for rank in (0, 1):
        mine = [s for s in spans if s.rank == rank]
        steps = [s for s in mine if s.action.op is Op.STEP and s.action.step in MIDDLE]
        assert len(steps) == len(MIDDLE)
        for step in steps:
            assert step.beside
            assert step.end - step.start < 20, f"rank {rank} did nothing during {step.action}"
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
