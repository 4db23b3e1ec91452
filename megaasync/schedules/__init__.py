"""Who does what, when: pipeline schedules as pure tables (standard library only)."""

from megaasync.schedules.action import COMPUTE_OPS, Action, Op, parse_action
from megaasync.schedules.catalog import SCHEDULES, build_schedule
from megaasync.schedules.kind import ScheduleKind
from megaasync.schedules.metrics import BufferCounts, ScheduleMetrics, buffer_counts, schedule_metrics
from megaasync.schedules.phases import Phase, make_phases
from megaasync.schedules.render import color_of, legend_of, render_svg, render_text
from megaasync.schedules.rules import check, check_table, show_with_arrow
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError
from megaasync.schedules.simulation import Costs, Span, bubble_of, simulate
from megaasync.schedules.unroll import Segment, unroll, unroll_all

__all__ = [
    "COMPUTE_OPS",
    "SCHEDULES",
    "Action",
    "BufferCounts",
    "Costs",
    "Op",
    "Phase",
    "PipelineSchedule",
    "ScheduleError",
    "ScheduleKind",
    "ScheduleMetrics",
    "Segment",
    "Span",
    "bubble_of",
    "buffer_counts",
    "build_schedule",
    "check",
    "check_table",
    "color_of",
    "legend_of",
    "make_phases",
    "parse_action",
    "render_svg",
    "render_text",
    "schedule_metrics",
    "show_with_arrow",
    "simulate",
    "unroll",
    "unroll_all",
]
