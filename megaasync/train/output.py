"""Rank 0's outputs: metrics.jsonl, the tracker, the progress line, and at the end summary, trace and report."""

import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from megaasync.checkpoint.paths import mark_of
from megaasync.cluster.script import REQUEUE
from megaasync.config.pipeline import phases_of
from megaasync.config.plain import to_plain
from megaasync.config.schema import Config
from megaasync.data.identity import Identity
from megaasync.models.flops import utilisation
from megaasync.observe.progress import Progress
from megaasync.observe.report import metric_curves, render_facts, render_page, show
from megaasync.observe.run_files import (
    FolderLost,
    MetricsFile,
    iterate_metrics,
    thinned_metrics,
    write_json,
    write_text,
)
from megaasync.observe.spikes import SpikeWatch
from megaasync.observe.trace import Timeline, write_chrome_trace
from megaasync.observe.tracker import WandbTracker
from megaasync.plan.plan import main_schedule, make_plan
from megaasync.plan.text import render_plan, summarise_plan
from megaasync.schedules import render_svg, simulate
from megaasync.train.trainer import TrainOutcome

_STEPS_DRAWN = 3
_ROWS_DRAWN = 5000


class RunOutput:
    """Observes a run on rank 0 and writes its folder; a context manager."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        data: Identity | None = None,
        began: float | None = None,
    ) -> None:
        """The outputs of a run.

        Args:
            config: validated.
            folder: the run folder.
            data: hashes of tokenizer and tokens.
            began: `perf_counter` when the run was started on this host; None for now.
        """
        self._config, self._folder, self._data = config, folder, data
        self._plan = make_plan(config)
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._progress = Progress(steps=config.train.steps, interval=config.logging.interval)
        wandb = config.logging.wandb
        is_tracked = wandb.mode != "disabled"
        self._tracker = WandbTracker(wandb, folder=folder, run_config=to_plain(config)) if is_tracked else None
        self._began = perf_counter() if began is None else began
        self._startup_seconds, self._has_begun, self._is_tracker_lost = 0.0, False, False
        self._spikes = SpikeWatch(config.logging.spike_threshold)
        for row in iterate_metrics(folder / "metrics.jsonl"):  # of the run that goes on
            if row["kind"] == "train":
                self._spikes.look(float(row["loss"]))  # "nan" is written as text

    def __enter__(self) -> "RunOutput":
        return self

    def notify(self, line: str) -> None:
        """Print a line for the user."""
        self._progress.notify(line)

    def begin(self, *, has_validation: bool, step: int, checkpoint: Path | None, kernels: str) -> None:
        """Training is about to begin, from `step` on: everything that a wrong config or file can stop is passed."""
        self._startup_seconds = perf_counter() - self._began
        write_json(self._folder / "plan.json", self._plan)
        (self._folder / REQUEUE).unlink(missing_ok=True)
        self._metrics.write(
            {
                "kind": "start",
                "step": step,
                "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "checkpoint_crc32": None if checkpoint is None else mark_of(checkpoint),
                "layout": self._plan["layout"],
                "clip": self._plan["clip"],
                "kernels": kernels,
                "data": dict(self._data or {}),
            }
        )
        self._progress.__enter__()
        self._progress.notify(summarise_plan(self._plan))
        if kernels != "torch":
            self._progress.notify(f"kernels    {kernels}")
        if checkpoint is not None:
            self._progress.notify(f"goes on after step {step} from {checkpoint}")
        if not has_validation:
            self._progress.notify(
                "no validation: the held-out data has fewer than model.seq_length + 1 tokens; more data or a larger "
                "data.validation_fraction gives some"
            )
        self._has_begun = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._has_begun:
            self._progress.__exit__()
        with suppress(OSError):  # a full disk has been told of by the row that did not fit
            self._metrics.close()
        if self._tracker is not None:
            self._tracker.close()
            if self._tracker.problem and not self._is_tracker_lost:
                print(f"wandb: {self._tracker.problem}; metrics.jsonl has every row", flush=True)
        if error is not None and self._has_begun and not isinstance(error, FolderLost):
            with suppress(OSError):  # the error may be that nothing can be written
                write_json(self._folder / "summary.json", {"status": "failed", "message": str(error)})

    def on_row(self, row: dict[str, Any]) -> None:
        """Write, track and show one row."""
        self._metrics.write(row)
        if self._tracker is not None:
            self._tracker.log(row)
            if self._tracker.problem and not self._is_tracker_lost:
                self._is_tracker_lost = True
                self._progress.notify(f"wandb: {self._tracker.problem}; training goes on, metrics.jsonl has every row")
        self._progress.show(row)
        if row["kind"] == "train":
            self._look_for_spike(row)

    def _look_for_spike(self, row: Mapping[str, Any]) -> None:
        found = self._spikes.look(row["loss"])
        if found is not None:
            median, above = found
            spike = {"kind": "spike", "step": row["step"], "loss": row["loss"], "median": median, "above": above}
            self._metrics.write(spike)
            self._progress.notify(
                f"step {row['step']}: loss spike, {row['loss']:.4f} is {above:.1f} standard deviations above the "
                f"median {median:.4f} of the batches before; its gradient norm is {row['grad_norm']:.3g}"
            )

    def finish(self, outcome: TrainOutcome) -> None:
        """Write summary.json, trace.json and report.html."""
        summary = self._summary(outcome)
        if self._config.logging.trace:
            write_chrome_trace(outcome.timeline, self._folder / "trace.json")
        rows = thinned_metrics(self._folder / "metrics.jsonl", most=_ROWS_DRAWN)
        write_text(self._folder / "report.html", self._report(summary, rows, outcome.timeline))
        write_json(self._folder / "summary.json", summary)
        if outcome.requeue and outcome.status == "interrupted":  # there is progress on disk to go on from
            (self._folder / REQUEUE).touch()
        self._progress.notify(
            f"{outcome.status} after {outcome.steps} steps: validation loss {show(outcome.val_loss)}, "
            f"{show(outcome.tokens_per_second)} tokens/s, bubble {show(summary['bubble_measured'])} measured, "
            f"{show(summary['bubble_planned'])} planned\nreport: {self._folder / 'report.html'}"
        )

    def _summary(self, outcome: TrainOutcome) -> dict[str, Any]:
        bubble = outcome.timeline.bubble(num_steps=outcome.steps)
        edges = outcome.timeline.edges(num_steps=outcome.steps)
        reached, share = utilisation(
            self._config.model,
            tokens_per_second=outcome.tokens_per_second or 0.0,
            ranks=self._config.world_size,
            device_name=outcome.device_name,
        )
        failed = {"message": f"the last checkpoint could not be saved: {outcome.save_problem}"}
        return {
            "status": "failed" if outcome.save_problem else outcome.status,
            **(failed if outcome.save_problem else {}),
            "checkpoint_step": outcome.saved_step,
            "steps": outcome.steps,
            "tokens": outcome.tokens,
            "train_loss": outcome.train_loss,
            "val_loss": outcome.val_loss,
            "tokens_per_second": outcome.tokens_per_second,
            "tflops_per_rank": reached or None,
            "mfu": share if math.isfinite(share) and reached else None,
            "schedule": self._config.schedule.name,
            "correction": self._config.correction.name,
            "bubble_planned": self._plan["bubble"],
            "bubble_measured": bubble,
            "fill_seconds": edges[0],
            "drain_seconds": edges[1],
            "peak_memory_bytes": outcome.peak_memory_bytes,
            "startup_seconds": self._startup_seconds,
            "wall_seconds": perf_counter() - self._began,
        }

    def _report(self, summary: Mapping[str, Any], rows: list[dict[str, Any]], timeline: Timeline) -> str:
        schedule = main_schedule(phases_of(self._config))
        planned = simulate(schedule, num_steps=_STEPS_DRAWN)
        drawings = render_svg(
            planned, title=f"planned: {schedule.name}, bubble {self._plan['bubble']:.1%}", unit="forwards"
        )
        # of several pipelines that run alike, the one with rank 0
        timeline = timeline.of_ranks(self._config.parallel_dims.ranks_along(0, ("pipeline",)))
        seen = sorted({span.action.step for span in timeline.spans})  # of this start: a resumed run has not all
        middle = max(seen[len(seen) // 2], 1) if seen else 1
        start, end = timeline.part(first_step=middle, last_step=middle + _STEPS_DRAWN - 1)
        if end > start:
            measured = summary["bubble_measured"]
            share = "" if measured is None else f", bubble {measured:.1%} over the run"
            drawings += render_svg(
                timeline.spans,
                title=f"measured: steps {middle + 1} to {middle + _STEPS_DRAWN}{share}",
                unit="seconds",
                start=start,
                end=end,
            )
        config = self._config
        setting = {
            "model": config.model.name,
            "parameters": self._plan["total_parameters"],
            "active": self._plan["active_parameters"],
            "data": config.data.name,
            "optimizer": config.optimizer.name,
            "lr": config.optimizer.lr,
            "layout": ", ".join(f"{axis} {size}" for axis, size in reversed(self._plan["layout"].items())),
            "microbatches": config.num_microbatches,
            "dtype": config.train.dtype,
            "seed": config.train.seed,
        }
        return render_page(
            title=f"megaasync run {self._folder.name}: {summary['status']}",
            sections=[
                (
                    "Result and setting",
                    f'<div class="curves"><div>{render_facts(summary)}</div><div>{render_facts(setting)}</div></div>',
                ),
                ("Curves", metric_curves(rows)),
                ("Pipeline", drawings),
                ("Plan", f"<pre>{render_plan(self._plan)}</pre>"),
            ],
        )
