"""The plan for people: in ten lines for a screen, and whole for the report."""

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_LINES, _WIDTH = 10, 100
_MOST_STAGES = 8  # that are listed one by one on a screen


def size_text(count: float) -> str:
    """Bytes in the largest unit that keeps them above one."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _listed(values: Sequence[str]) -> str:
    """One by one if they are few, else from the first to the last by size as given."""
    if len(set(values)) == 1:
        return f"{values[0]} each" if len(values) > 1 else values[0]
    return ", ".join(values) if len(values) <= _MOST_STAGES else f"{values[0]} (first) to {values[-1]} (last)"


def summarise_plan(plan: Mapping[str, Any]) -> str:
    """What a plan comes to, in at most ten lines of a hundred letters; plan.json and the report have the rest."""
    layout, stages = plan["layout"], plan["stages"]
    degrees = ", ".join(f"{axis} {size}" for axis, size in reversed(layout.items()))
    slack = [stage["slack"] for stage in stages]
    optimizers: dict[str, int] = {}
    for line in plan["routing"]:
        optimizers[line["rule"]] = optimizers.get(line["rule"], 0) + line["parameters"]
    sent = [f"{kind} {size_text(count)}" for kind, count in plan["communication_bytes_per_step"].items() if count > 1e6]
    lines = [
        f"parameters {plan['total_parameters']:,}, {plan['active_parameters']:,} active per token, "
        f"{plan['flops_per_token'] / 1e9:.3g} GFLOP per token",
        f"layout     {degrees}: {plan['world_size']} rank(s), {layout['data'] * layout['expert']} with different "
        "sequences",
        f"schedule   {plan['schedule']}, correction {plan['correction']}, {plan['num_microbatches']} microbatches, "
        f"{plan['tokens_per_step']:,} tokens per step, {_count(plan['tokens'])} in all",
        f"bubble     {plan['bubble']:.1%} planned, slack {_range(slack)} forwards"
        + "".join(
            f"; hops of {line['hop']:g}: {max(line['bubble'], 0):.1%} at extra_in_flight={line['extra_in_flight']}"
            for line in plan["hops"][:1]
        ),
        f"memory     per rank, by stage: {_listed([size_text(stage['total_bytes']) for stage in stages])}"
        + (f"; over 1f1b {size_text(max(plan['bytes_over_1f1b']))}" if plan["bytes_over_1f1b"] else ""),
        f"weights    per rank, by stage: {_listed([_count(stage['parameters_per_rank']) for stage in stages])} "
        f"parameters; {', '.join(f'{rule} steps {_count(count)}' for rule, count in optimizers.items())}",
    ]
    times = [stage["seconds"] for stage in stages if stage["seconds"]]
    if times:
        lines.append(
            f"times      about {max(t['forward'] for t in times):.3g} s a forward, "
            f"{max(t['step'] for t in times):.3g} s an optimizer step, "
            f"{max(t['reduction'] for t in times):.3g} s a reduction"
        )
    if sent:
        lines.append(f"transfer   per step, all ranks: {', '.join(sent)}")
    if plan["world_size"] == 1 and any(plan["delays"]):
        lines.append("delay      on one rank this is a study of late gradients; schedule=1f1b trains without")
    room = _MOST_LINES - len(lines)
    warnings = [f"WARNING    {warning}" for warning in plan["warnings"]]
    if len(warnings) > room:
        warnings = [*warnings[: room - 1], f"           {len(warnings) - room + 1} more warnings are in plan.json"]
    return "\n".join(_fitted(line) for line in lines + warnings)


def _fitted(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _stage_lines(stage: Mapping[str, Any]) -> list[str]:
    kinds = ", ".join(f"{kind.replace('_', ' ')} {size_text(count)}" for kind, count in stage["bytes"].items() if count)
    first, end = stage["layers"]
    lines = [
        f"stage {stage['stage']}    from rank {stage['rank']}, layers {first} to {end - 1}, {stage['parameters']:,} "
        f"parameters, {stage['parameters_per_rank']:,} per rank: {size_text(stage['total_bytes'])} = {kinds}; "
        f"{stage['weight_versions']} weight version(s), {stage['microbatches_in_flight']} microbatch(es) in flight, "
        f"slack {stage['slack']:.3g} forwards"
    ]
    if seconds := stage["seconds"]:
        lines.append(
            f"           about {seconds['forward']:.3g} s per forward, slack {seconds['slack']:.3g} s against "
            f"{seconds['reduction']:.3g} s of reduction and {seconds['step']:.3g} s of optimizer step and gathering"
        )
    return lines


def render_plan(plan: Mapping[str, Any]) -> str:
    """The plan for people."""
    layout = plan["layout"]
    degrees = ", ".join(f"{axis} {size}" for axis, size in reversed(layout.items()))
    megatron = layout["data"] * layout["expert"]
    lines = [
        f"parameters {plan['total_parameters']:,} (active per token {plan['active_parameters']:,}, "
        f"{plan['flops_per_token'] / 1e9:.4g} GFLOP per token, forward and backward)",
        f"layout     {degrees}: {plan['world_size']} rank(s); {megatron} hold different sequences "
        "(data x expert, Megatron's data-parallel size)",
        f"schedule   {plan['schedule']}, correction {plan['correction']}, {plan['num_microbatches']} microbatches per "
        f"step, {plan['tokens_per_step']:,} tokens per step, {plan['tokens']:,} in all",
        *(
            f"phase      steps {phase['first_step']} to {phase['last_step']}: {phase['schedule']}"
            for phase in plan["phases"]
            if len(plan["phases"]) > 1
        ),
        *(["clipping   each stage by its own gradient norm"] if plan["clip"] == "stage" else []),
        f"bubble     {plan['bubble']:.1%} planned (forward 1, backward 2, no hop or step cost)",
    ]
    lines += [
        f"hops       at {line['hop']:g} forwards each: bubble {max(line['bubble'], 0):.1%} with "
        f"schedule.extra_in_flight={line['extra_in_flight']} (at most {line['most_in_flight']} microbatches in flight)"
        for line in plan["hops"]
    ]
    for stage in plan["stages"]:
        lines += _stage_lines(stage)
    if len(plan["ranks"]) < len(plan["stages"]):
        totals = ", ".join(f"rank {line['rank']} {size_text(line['total_bytes'])}" for line in plan["ranks"])
        lines.append(f"ranks      each holds several stages: {totals}")
    if plan["bytes_over_1f1b"]:
        extra = ", ".join(size_text(count) for count in plan["bytes_over_1f1b"])
        lines.append(f"over 1f1b  per rank, by stage: {extra}")
    for line in plan["routing"]:
        lines.append(
            f"updates    {line['rule']} with weight decay {line['weight_decay']:g}: {line['role']}, "
            f"{line['tensors']} tensor(s), {line['parameters']:,} parameters"
        )
    if any(line["rule"] == "Muon" and "expert" in line["role"] for line in plan["routing"]):
        lines.append(
            "           an expert that never got a token decays only; one that did goes on by its decayed momentum"
        )
    sent = ", ".join(
        f"{kind} {size_text(count)}" for kind, count in plan["communication_bytes_per_step"].items() if count
    )
    lines.append(f"transfer   per step, all ranks together: {sent or 'nothing'}")
    lines += [f"WARNING    {warning}" for warning in plan["warnings"]]
    return "\n".join(lines)
