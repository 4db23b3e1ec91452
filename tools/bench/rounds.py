"""Rounds of measurements, alternated between the schedules of a setting, and what is written of them."""

import time
from pathlib import Path

from megaasync.config import ConfigError
from megaasync.entry.spawn import spawn_ranks
from megaasync.observe.trace import Timeline, merge
from megaasync.schedules import SCHEDULES, ScheduleError, Span, build_schedule, render_svg, simulate

from .case import TORCH_SCHEDULES, Case, Emulation, Measured
from .emulated import costs_of, measure, planned, schedule_of
from .emulated import run_rank as run_emulated
from .options import Bench
from .real import measure_timeline, real_config
from .real import run_rank as run_real
from .show import Line, print_table, rows_of, write_csv, write_png
from .torch_schedules import measure_emulated, run_emulated_rank, run_real_rank


def cases_of(bench: Bench, *, num_ranks: int, per_rank: int) -> list[Case]:
    """The schedules that are defined for a size."""
    microbatches = num_ranks * per_rank or 1
    names = [*TORCH_SCHEDULES, *(name for name in SCHEDULES if name != "pipedream")]
    names = names if bench.schedules == "all" else list(bench.schedules)
    if bench.real_update:
        names = [name for name in names if name in SCHEDULES]
    cases = []
    for name in names:
        is_ours = name in SCHEDULES
        extra = bench.extra_in_flight if is_ours and SCHEDULES[name].takes_extra_in_flight else 0
        case = Case(
            "megaasync" if is_ours else "torch",
            name,
            num_ranks,
            microbatches,
            bench.steps,
            extra_in_flight=extra,
            overlap=bench.overlap_step or not is_ours,
        )
        if is_ours:
            try:
                build_schedule(name, num_ranks=num_ranks, num_microbatches=microbatches, extra_in_flight=extra)
            except ScheduleError as error:
                print(f"left out: {error}", flush=True)
                continue
        cases.append(case)
    return cases


def emulation_of(bench: Bench) -> Emulation:
    """Costs in seconds."""
    forward = bench.forward_ms / 1000
    return Emulation(
        forward,
        bench.backward_ms / 1000,
        hop=bench.hop * forward,
        reduce=bench.reduce * forward,
        step=bench.step * forward,
        real_update=bench.real_update,
    )


def run_ours_emulated(case: Case, costs: Emulation) -> list[list[Span]]:
    """Spans of the ranks of the first replica."""
    parts = spawn_ranks(run_emulated, (case, costs), world_size=case.num_ranks * costs.replicas)
    return parts[:: costs.replicas]


def measure_once(bench: Bench, case: Case) -> Measured:
    """One measurement of one case, on fresh ranks."""
    is_ours = case.engine == "megaasync"
    if bench.mode == "emulated":
        costs = emulation_of(bench)
        if is_ours:
            return measure(run_ours_emulated(case, costs), case).measured
        return measure_emulated(spawn_ranks(run_emulated_rank, (case, costs), world_size=case.num_ranks), case)
    config = real_config(case, bench.overrides)
    if is_ours:
        timeline, _ = spawn_ranks(run_real, (config,), world_size=case.num_ranks)[0]
        return measure_timeline(timeline, case).measured
    ends, _ = spawn_ranks(run_real_rank, (case, config), world_size=case.num_ranks)[0]
    return Measured((ends[-2] - ends[1]) / (len(ends) - 3), None)


def draw_timelines(bench: Bench, case: Case, folder: Path) -> None:
    """Two steps of an emulated run, planned above and measured below, in one SVG file each."""
    costs = emulation_of(bench)
    run = measure(run_ours_emulated(case, costs), case)
    schedule, plan_costs = schedule_of(case), costs_of(case, costs)
    spans = simulate(schedule, num_steps=case.num_steps, costs=plan_costs, overlap=case.overlap)
    size = f"P = {case.num_ranks}, m = {case.num_microbatches}"
    wanted = planned(case, costs)
    first = case.num_steps // 2
    timelines = {"planned": (merge([(spans, [])]), wanted.bubble), "measured": (run.timeline, run.measured.bubble)}
    for kind, (timeline, bubble) in timelines.items():
        start, end = Timeline(timeline.spans, case.num_ranks).part(first_step=first, last_step=first + 1)
        title = f"{case.schedule}, {size}, {kind}: bubble {max(bubble, 0):.1%}"
        path = folder / f"timeline-{case.schedule}-{kind}.svg"
        path.write_text(render_svg(timeline.spans, title=title, unit="seconds", start=start, end=end))
        print(path, flush=True)


def measure_setting(bench: Bench, cases: list[Case]) -> list[Line]:
    """All cases of one size, round by round, in alternating order."""
    is_real = bench.mode == "real"
    plan_costs = Emulation(1.0, 2.0) if is_real else emulation_of(bench)
    lines = []
    for case in cases:
        tokens = case.num_microbatches
        if is_real:
            config = real_config(case, bench.overrides)
            tokens = config.train.global_batch_size * config.model.seq_length
        lines.append(Line(case, [], planned(case, plan_costs) if case.engine == "megaasync" else None, tokens))
    for number in range(bench.rounds):
        for line in lines if number % 2 == 0 else reversed(lines):
            start = time.monotonic()
            line.rounds.append(measure_once(bench, line.case))
            print(
                f"round {number + 1}/{bench.rounds}  P = {line.case.num_ranks}, m = {line.case.num_microbatches}  "
                f"{line.case.label}: {line.rounds[-1].period:.4f} s per step ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
    return lines


def run(bench: Bench) -> None:
    """Measure every setting, and write what there is after each."""
    folder = Path(bench.out or Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    all_rows, settings = [], []
    for num_ranks in bench.ranks:
        for per_rank in bench.microbatches_per_rank:
            cases = cases_of(bench, num_ranks=num_ranks, per_rank=per_rank)
            if not cases:
                print(
                    f"P = {num_ranks}, m = {num_ranks * per_rank or 1}: none of the schedules is defined",
                    flush=True,
                )
                continue
            lines = measure_setting(bench, cases)
            rows = rows_of(lines)
            title = f"{bench.mode} compute, P = {num_ranks}, m = {num_ranks * per_rank or 1}"
            unit = "tokens" if bench.mode == "real" else "microbatches"
            print_table(f"{title}, medians of {bench.rounds}", rows, unit=unit)
            for line in lines if bench.timelines and bench.mode == "emulated" else ():
                if line.case.engine == "megaasync":
                    draw_timelines(bench, line.case, folder)
            all_rows += [{"mode": bench.mode, **row} for row in rows]
            settings.append((title, rows))
            write_csv(folder / "bench.csv", all_rows)  # after every setting: an interrupt keeps what there is
            write_png(folder / "bench.png", settings)
    if not settings:
        raise ConfigError("schedules: nothing to measure at these sizes")
    print(f"{folder / 'bench.csv'}\n{folder / 'bench.png'}")
