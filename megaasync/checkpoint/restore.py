"""From a checkpoint to a run that goes on: which settings must agree, what is loaded, and what is flushed first.

On the schedule that made it, the delay, the pending gradients and the published weights go on exactly. Under another
delay the pending gradients are applied first, and the new schedule begins as a phase of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from megaasync.checkpoint.compatibility import FORMAT
from megaasync.checkpoint.stage_state import ShardedStateDict, StageState, merge_state_dicts
from megaasync.config.schema import ConfigError
from megaasync.pipeline.step_runner import PendingStep, StepRunner
from megaasync.pipeline.step_stats import StepResult
from megaasync.schedules import Phase, PipelineSchedule


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        step: batches done.
        tokens: valid tokens seen.
        train_loss: of the last batch.
        phases: those of the config, or with the rest of one under a new schedule.
    """

    step: int
    tokens: int
    train_loss: float | None
    phases: tuple[Phase, ...]


def pending_from(meta: Mapping[str, Any]) -> dict[int, PendingStep]:
    """The pending batches of a checkpoint."""
    own: dict[int, dict[int, tuple[float, float]]] = {}
    for part in meta["ranks"]:
        for step, by_stage in part.get("own", {}).items():
            own.setdefault(int(step), {}).update({int(k): tuple(v) for k, v in by_stage.items()})
    return {
        batch["step"]: PendingStep(
            StepResult(
                batch["step"],
                float(batch["loss"]),
                float(batch["grad_norm"]),
                batch["tokens"],
                backward_done_at=0.0,
                stop=False,
            ),
            own.get(batch["step"], {}),
        )
        for batch in meta["pending"]
    }


def build_metadata(
    step: int, *, tokens: int, train_loss: float | None, phase: Phase, states: Sequence[StageState], runner: StepRunner
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what a checkpoint says of the pipeline, what this rank alone knows)."""
    pending = runner.pending_steps()
    schedule = phase.schedule
    behind = [max(0, step - max(schedule.version(stage=stage, step=step), 0)) for stage in range(schedule.num_stages)]
    is_flushed = all(state.stage.num_updates == step for state in states)
    meta = {
        "format": FORMAT,
        "step": step,
        "tokens": tokens,
        "train_loss": train_loss,
        "schedule": schedule.name,
        "since": schedule.start_step,
        "skipped": list(runner.skipped),
        "pending_of_stage": [0] * schedule.num_stages if is_flushed else behind,
        "pending": [
            {"step": s, "loss": k.result.loss, "grad_norm": k.result.grad_norm, "tokens": k.result.tokens}
            for s, k in pending.items()
        ],
    }
    own = {str(s): {str(i): list(v) for i, v in k.own.items()} for s, k in pending.items() if k.own}
    return meta, {
        "own": own,
        "num_skipped": {str(state.stage.place.index): state.stage.optimizer.num_skipped for state in states},
    }


def entries_at(
    states: Sequence[StageState], step: int, *, schedule: PipelineSchedule, compensates: bool
) -> ShardedStateDict:
    """Everything of this rank's stages, after `step` batches under a schedule; views."""
    parts = []
    for state in states:
        done = state.stage.num_updates
        parts += [state.optimizer_entries(), state.version_entries(version=done, number=0)]
        for pending in range(done, step):
            parts.append(state.gradient_entries(step=pending, number=step - pending))
            if compensates:  # of the weights that it was taken at
                taken_at = schedule.version(stage=state.stage.place.index, step=pending)
                parts.append(state.version_entries(version=taken_at, number=pending - step))
    return merge_state_dicts(parts)


class _Loader:
    def __init__(self, path: Path, group: dist.ProcessGroup | None) -> None:
        self._path, self._group = path, group

    def __call__(self, entries: ShardedStateDict) -> None:
        with torch.no_grad():
            from megaasync.checkpoint.dcp_io import load  # takes a second, for runs that resume

            load(entries, self._path, group=self._group)


def restore(
    path: Path,
    meta: Mapping[str, Any],
    *,
    states: Sequence[StageState],
    runner: StepRunner,
    phases: tuple[Phase, ...],
    compensates: bool,
    group: dist.ProcessGroup | None,
) -> ResumePoint:
    """Load a checkpoint into freshly built stages. All ranks call it together.

    Args:
        path: the folder, complete.
        meta: what it says about itself.
        states: of this rank's stages.
        runner: of this rank.
        phases: of the config.
        compensates: gradients are compensated for their delay.
        group: all ranks, over gloo; None for a single rank.

    Raises:
        ConfigError: the checkpoint does not fit.
    """
    step, behind, pending = meta["step"], meta["pending_of_stage"], pending_from(meta)
    phases = tuple(_with_start(candidate, meta) for candidate in phases)
    phase = next((candidate for candidate in phases if candidate.first_step <= step < candidate.end_step), phases[-1])
    wanted = [max(0, step - phase.schedule.version(stage=s, step=step)) for s in range(phase.schedule.num_stages)]
    is_uniform = len(set(behind)) == 1
    goes_on = behind == wanted if not is_uniform else set(behind) == set(wanted)
    if not goes_on and not is_uniform:
        raise ConfigError(
            f"schedule={phase.schedule.name}: the checkpoint {path} was made by schedule={meta['schedule']}, whose "
            f"stages are {behind} updates behind; resume it with that schedule and as many stages"
        )
    if not goes_on and behind[0] and compensates:
        raise ConfigError(
            f"correction=taylor: the checkpoint {path} has {behind[0]} pending gradient(s) of another schedule; resume "
            "with that schedule or with correction=none"
        )
    runner.skipped.extend(meta["skipped"])
    loader = _Loader(path, group)
    # stage by stage: a tied embedding is in two stages under one name, and both copies are to be written
    for state in states:
        loader(state.optimizer_entries())
    for state in states:
        # equal for all stages, or stage by stage as they were
        stage, late = state.stage, behind[0] if is_uniform else behind[state.stage.place.index]
        stage.optimizer.num_updates = step - late
        stage.optimizer.num_skipped = sum(skipped < step - late for skipped in meta["skipped"])
        counts = {key: count for part in meta["ranks"] for key, count in part["num_skipped"].items()}
        if len(counts) == phase.schedule.num_stages:  # under pipedream each stage may have skipped others
            stage.optimizer.num_skipped = counts[str(stage.place.index)]
        if stage.balance is not None:
            for s in range(step - late, step):
                stage.balance.expect(s)
            stage.balance.write_version(stage.num_updates)
    if goes_on:
        for state in states:
            loader(entries_at([state], step, schedule=phase.schedule, compensates=compensates))
        for state in states:
            stage, done = state.stage, state.stage.num_updates
            older = (phase.schedule.version(stage=stage.place.index, step=s) for s in range(done, step) if compensates)
            for version in sorted({done, *older}):
                stage.gather_version(version)
        for s, known in pending.items():
            if any(state.stage.num_updates <= s for state in states):
                runner.restore_pending(s, known)
        return ResumePoint(step, meta["tokens"], meta["train_loss"], phases)
    for s in range(step - behind[0], step):
        for state in states:
            loader(state.gradient_entries(step=s, number=step - s))
        for state in states:
            if pending[s].result.is_finite:
                state.stage.step(s, scale=runner.scale_of(pending[s]), lookahead_steps=0)
            else:
                state.stage.skip(s)
    for state in states:
        state.stage.load_master_into_slot(step)
    return ResumePoint(step, meta["tokens"], meta["train_loss"], _begun_at(phases, step))


def _begun_at(phases: tuple[Phase, ...], step: int) -> tuple[Phase, ...]:
    """The phases from `step` on, whose first one begins there with no gradient pending."""
    rest = []
    for phase in phases:
        if phase.first_step < step < phase.end_step:
            rest.append(replace(phase, schedule=replace(phase.schedule, start_step=step), first_step=step))
        elif phase.end_step > step:
            rest.append(phase)
    last = phases[-1]
    return tuple(rest) or (replace(last, schedule=replace(last.schedule, start_step=step), first_step=step),)


def _with_start(phase: Phase, meta: Mapping[str, Any]) -> Phase:
    """The phase as it was when the checkpoint was made: an earlier resume may have begun it later than the config."""
    schedule, start = phase.schedule, meta["since"]
    if schedule.name == meta["schedule"] and phase.first_step < start <= meta["step"] < phase.end_step:
        return replace(phase, schedule=replace(schedule, start_step=start), first_step=start)
    return phase
