"""Who does what, when: pipeline schedules as pure tables (standard library only)."""

from megaasync.schedules.action import Action, Op, parse_action
from megaasync.schedules.render import render_svg, render_text
from megaasync.schedules.rules import check, check_table, show_with_arrow
from megaasync.schedules.schedule import PipelineSchedule, ScheduleError, unroll, unroll_all
from megaasync.schedules.simulation import Costs, ScheduleReport, Span, bubble_of, report, simulate
from megaasync.schedules.stream_1f1b import one_f_one_b, pipedream_2bw

SCHEDULES = {"1f1b": one_f_one_b, "2bw": pipedream_2bw}

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Op",
    "PipelineSchedule",
    "ScheduleError",
    "ScheduleReport",
    "Span",
    "bubble_of",
    "check",
    "check_table",
    "parse_action",
    "render_svg",
    "render_text",
    "report",
    "show_with_arrow",
    "simulate",
    "unroll",
    "unroll_all",
]
