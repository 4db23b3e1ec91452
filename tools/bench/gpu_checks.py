"""The checks of `tools/gpu_check.py`, each by itself; sizes for a GPU of 80 GiB or more, and toy ones for a CPU."""

import gc
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from megaasync.config import Config, read, validate
from megaasync.data.corpus import PythonStdlibCorpus, is_held_out
from megaasync.data.indexed_dataset import IndexedWriter
from megaasync.data.microbatches import Microbatch
from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.kernels.backend import Kernels
from megaasync.kernels.choose import choose_kernels
from megaasync.kernels.weight_gradients import apex_extension
from megaasync.models.flops import utilisation
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import DecoderStage
from megaasync.nn.layer_context import LayerContext
from megaasync.nn.torch_kernels import TORCH_KERNELS
from megaasync.plan.plan import make_plan
from megaasync.schedules import COMPUTE_OPS, Op
from megaasync.train.build import build_trainer
from megaasync.train.trainer import TrainOutcome

from .line import Line
from .muon import compare, matrix_shapes
from .plain_config import compose

_ALONE = RankEnvironment(0, 1, 0, 1, "")
_BYTES = 256  # ids of text as bytes, for machines without a tokenizer


@dataclass(slots=True)
class Place:
    """Where the checks run, and what they share.

    Attributes:
        device: of them.
        out: folder of what they write.
        deadline: `perf_counter` at which the last one should be done.
    """

    device: torch.device
    out: Path
    deadline: float

    @property
    def is_gpu(self) -> bool:
        """Else sizes are toys."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def config_of(place: Place, groups: dict[str, str], overrides: dict[str, Any]) -> Config:
    """A validated config on this device, without checkpoints."""
    always = {"checkpoint.interval": None, "device": place.device.type, "data.num_tokens": 2_000_000}
    if groups.get("data") != "synthetic":
        del always["data.num_tokens"]
    return validate(read(Config, compose(groups, always | overrides)))


class _Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_row(self, row: dict[str, Any]) -> None:
        """A row of metrics."""
        self.rows.append(row)

    def tokens_per_second(self) -> float:
        """Median over the steps after the first three, whose kernels are chosen and whose pipeline fills."""
        return statistics.median([row["tokens_per_second"] for row in self.rows if row["kind"] == "train"][3:])


def train(place: Place, config: Config, prepared: PreparedData | None = None) -> tuple[_Rows, TrainOutcome, float]:
    """The product's own run, in this process: rows, outcome, and seconds."""
    rows, start = _Rows(), perf_counter()
    gc.collect()
    if place.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place.device)
    trainer = build_trainer(
        config,
        environment=_ALONE,
        prepared=prepared or PreparedData(None, None, None),
        device=place.device,
        observer=rows,
    )
    return rows, trainer.train(), perf_counter() - start


def what_is_here(place: Place) -> Iterator[Line]:
    """Versions."""
    name = torch.cuda.get_device_name(place.device) if place.is_gpu else "CPU"
    yield Line("device", f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    yield Line("apex's weight-gradient kernel", "found" if apex_extension() is not None else "not installed")
    said: list[str] = []
    found = _engine(place, said)
    yield Line("Transformer Engine", "found" if found is not None else (said or ["not installed"])[0])


def _engine(place: Place, said: list[str]) -> Kernels | None:
    """Transformer Engine's backend, if this device has it."""
    config = config_of(place, {"model": "tiny_dense", "data": "synthetic"}, {"train.dtype": "bfloat16"})
    kernels = choose_kernels(
        config, reference=TORCH_KERNELS, device=place.device, splits_backward=False, notify=said.append
    )
    return None if kernels is TORCH_KERNELS else kernels


def _numbers(
    place: Place, config: Config, kernels: Kernels, dtype: torch.dtype, *, documents: bool
) -> tuple[float, torch.Tensor]:
    """Loss and all gradients, in one float64 vector, of one microbatch, whose tokens may attend within documents."""
    model = config.model
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with place.device:
            stage = DecoderStage(model, range(model.num_layers), context=LayerContext(kernels, loss_chunk_tokens=64))
    finally:
        torch.set_default_dtype(before)
    stage.to(place.device)
    initialize_(dict(stage.named_parameters()), model, seed=0)
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    for parameter in stage.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=exact, device=place.device)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (2, model.seq_length + 1), generator=draw).to(place.device)
    mask = torch.ones(2, model.seq_length, dtype=torch.bool, device=place.device)
    numbers = (torch.arange(mask.numel(), device=place.device) // 37).view_as(mask) if documents else None
    loss = stage(None, Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask, numbers))
    loss.backward()
    parts = [p.main_grad if p.grad is None else p.main_grad + p.grad for p in stage.parameters()]
    return loss.item() / mask.sum().item(), torch.cat([part.double().flatten().cpu() for part in parts])


def correctness(place: Place) -> Iterator[Line]:
    """Each backend's loss and gradients against float64's."""
    shape = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 512}
    if not place.is_gpu:
        shape |= {"hidden_size": 64, "ffn_hidden_size": 128}
    shape = {f"model.{name}": size for name, size in shape.items()}
    engine = _engine(place, [])
    for name, documents in (("tiny_dense", False), ("tiny_dense", True), ("tiny_moe", False)):
        config = config_of(place, {"model": name, "data": "synthetic"}, shape)
        exact_loss, exact = _numbers(place, config, TORCH_KERNELS, torch.float64, documents=documents)
        backends = [("torch float32", TORCH_KERNELS, torch.float32), ("torch bfloat16", TORCH_KERNELS, torch.bfloat16)]
        backends += [("te bfloat16", engine, torch.bfloat16)] if engine is not None else []
        for title, kernels, dtype in backends:
            loss, gradients = _numbers(place, config, kernels, dtype, documents=documents)
            apart = ((gradients - exact).norm() / exact.norm()).item()
            # in bfloat16 a few tokens of a mixture go to other experts
            limit = 1e-4 if dtype is torch.float32 else (0.25 if name == "tiny_moe" else 0.05)
            off = abs(loss / exact_loss - 1)
            yield Line(
                f"{name}{', within documents' if documents else ''}, {title}: loss, gradients against float64",
                f"{off:.1e}, {apart:.1e} apart",
                f"gradients <= {limit:g}",
                apart <= limit and off <= limit,
            )
    if engine is None:
        yield Line("te against float64", "skipped: no Transformer Engine here")


def muon_step(place: Place) -> Iterator[Line]:
    """Muon over the matrices that one rank of the 10B recipe owns: 26 layers over 4 stages, 64 experts over 8 ranks."""
    small = {"model.num_layers": 2} if not place.is_gpu else {"model.num_layers": 6, "model.moe.num_experts": 8}
    config = config_of(place, {"model": "moe_10b" if place.is_gpu else "tiny_moe", "data": "synthetic"}, small)
    first = 1 if place.is_gpu else 0
    shapes = matrix_shapes(config.model, range(first, config.model.num_layers))
    times = compare(shapes, rounds=3, device=place.device)
    count = sum(math.prod(shape[:-2]) for shape in shapes.values())
    yield Line(
        f"Muon step, {count} matrices ({'bfloat16' if place.is_gpu else 'float32'} products)",
        f"{statistics.median(times.ours) * 1e3:.1f} ms; a loop in float32 takes {times.ratio:.2f} times as long; apart "
        f"{times.apart:.1e}",
    )


def _stage_config(place: Place, kind: str, schedule: str, overrides: dict[str, Any] | None = None) -> Config:
    """Six layers of moe_10b as one rank has them, with embedding and head: all dense, or 8 of its experts."""
    sizes: dict[str, Any] = {"train.eval_sequences": 1, "train.steps": 8, "train.warmup_steps": 0}
    if place.is_gpu:
        sizes |= {"model.num_layers": 6, "train.dtype": "bfloat16", "train.micro_batch_size": 1}
        sizes |= {"train.global_batch_size": 16, "data.num_tokens": 4_000_000}
        sizes |= {"model.moe": None} if kind == "dense" else {"model.moe.num_experts": 8}
        if kind == "moe":
            sizes |= {"model.moe.first_dense_layers": 0}
        groups = {"model": "moe_10b"}
    else:
        sizes |= {"model.seq_length": 64, "train.global_batch_size": 8, "train.micro_batch_size": 2}
        groups = {"model": "tiny_dense" if kind == "dense" else "tiny_moe"}
    groups |= {"schedule": schedule, "data": "synthetic"}
    return config_of(place, groups, sizes | (overrides or {}))


def _memory(place: Place, config: Config, outcome: TrainOutcome) -> Line:
    planned = max(line["total_bytes"] for line in make_plan(config)["ranks"])
    if not place.is_gpu:
        return Line("  memory", "skipped: a process on a CPU holds much besides")
    ratio = outcome.peak_memory_bytes / planned
    figure = f"{outcome.peak_memory_bytes / 2**30:.1f} GiB, planned {planned / 2**30:.1f} ({ratio:.2f})"
    return Line("  memory against the plan", figure, "within 10 %", abs(ratio - 1) <= 0.1)


def utilisations(place: Place) -> Iterator[Line]:
    """MFU of a dense and of a mixture's stage, with one and with two weight versions, forward, backward and step."""
    goals = {"dense": 0.55, "moe": 0.45}
    for kind, goal in goals.items():
        for schedule, versions in (("1f1b", "one version"), ("2bw", "two versions")):
            config = _stage_config(place, kind, schedule)
            rows, outcome, _ = train(place, config)
            rate = rows.tokens_per_second()
            reached, share = utilisation(config.model, tokens_per_second=rate, ranks=1, device_name=outcome.device_name)
            figure = f"{rate:,.0f} tokens/s, {reached:.3g} TFLOP/s"
            if math.isnan(share):
                yield Line(f"{kind} stage, {versions}", figure, f"MFU {goal:.0%} on a GPU")
            else:
                yield Line(f"{kind} stage, {versions}", f"{figure}, MFU {share:.1%}", f"MFU {goal:.0%}", share >= goal)
            yield _memory(place, config, outcome)


def exposure(place: Place) -> Iterator[Line]:
    """How much of a step Muon costs under 2bw, against a step that does next to nothing (SGD)."""
    settings = {"optimizer.lr": 1e-4}
    found: dict[str, list[float]] = {"muon": [], "sgd": []}
    for _ in range(3 if place.is_gpu else 2):
        for optimizer, rates in found.items():
            plain = _stage_config(place, "moe", "2bw")
            other = config_of(place, {"optimizer": optimizer, "data": "synthetic"}, settings)
            rates.append(train(place, replace(plain, optimizer=other.optimizer))[0].tokens_per_second())
    costs = [1 - muon / sgd for muon, sgd in zip(found["muon"], found["sgd"], strict=True)]
    cost = statistics.median(costs)
    figure = f"{cost:.1%} of a step ({min(costs):.1%} to {max(costs):.1%})"
    yield Line("optimizer exposed under 2bw", figure, "<= 2 % on a GPU", cost <= 0.02 if place.is_gpu else None)


def _overlap(inner: list[tuple[float, float]], outer: list[tuple[float, float]]) -> float:
    """Share of the time of some intervals that lies in others."""
    events = sorted(outer)
    merged: list[list[float]] = []
    for start, end in events:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    total = sum(end - start for start, end in inner)
    inside = sum(max(min(end, b) - max(start, a), 0.0) for start, end in inner for a, b in merged)
    return inside / total if total else math.nan


def side_stream(place: Place) -> Iterator[Line]:
    """A trace of a few steps: the optimizer runs beside forwards and backwards."""
    if not place.is_gpu:
        config = _stage_config(place, "moe", "2bw", {"logging.trace": True})
        spans = train(place, config)[1].timeline.spans
        steps = [(s.start, s.end) for s in spans if s.action.op is Op.STEP and s.beside]
        compute = [(s.start, s.end) for s in spans if s.action.op in COMPUTE_OPS]
        yield Line("optimizer under compute (spans)", f"{_overlap(steps, compute):.0%} of {len(steps)} steps")
        return
    # Transformer Engine has streams of its own, which would count as the optimizer's
    config = _stage_config(place, "moe", "2bw", {"train.steps": 5, "kernels": "torch"})
    path = place.out / "optimizer_under_compute.json"
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        train(place, config)
    profiler.export_chrome_trace(str(path))
    by_stream: dict[int, list[tuple[float, float]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            by_stream.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    if not by_stream:
        yield Line("kernels on a side stream under compute", "skipped: the profiler saw no kernels on this machine")
        return
    busiest = max(by_stream, key=lambda stream: sum(end - start for start, end in by_stream[stream]))
    beside = [span for stream, spans in by_stream.items() if stream != busiest for span in spans]
    share = _overlap(beside, by_stream[busiest])
    yield Line(
        "kernels on a side stream under compute",
        f"{share:.0%} of {sum(end - start for start, end in beside) / 1e3:.1f} ms; {path.name}",
        "most",
        share > 0.5,
    )


def _text(place: Place) -> PreparedData:
    """The standard library's source as bytes: needs no tokenizer."""
    paths = {False: place.out / "train", True: place.out / "validation"}
    with (
        IndexedWriter(paths[False], vocab_size=_BYTES) as train_file,
        IndexedWriter(paths[True], vocab_size=_BYTES) as validation_file,
    ):
        for document in PythonStdlibCorpus().documents():
            ids = np.frombuffer(document.text.encode(), dtype=np.uint8)
            held_out = is_held_out(document.key, fraction=0.02)
            (validation_file if held_out else train_file).add_document(ids)
    return PreparedData(paths[False], paths[True], None)


def delay_comparison(place: Place) -> Iterator[Line]:
    """SmolLM2-135M's body on text as bytes: AdamW and Muon, synchronous, delayed, with error feedback; equal steps."""
    prepared = _text(place)
    sizes: dict[str, Any] = {"model.vocab_size": _BYTES, "train.eval_sequences": 64, "data.path": str(prepared.train)}
    if place.is_gpu:
        groups = {"model": "smollm2_135m"}
        sizes |= {"train.dtype": "bfloat16", "train.global_batch_size": 32, "train.micro_batch_size": 16}
    else:
        groups = {"model": "tiny_dense"}
        sizes |= {"model.num_layers": 2, "model.hidden_size": 64, "model.ffn_hidden_size": 128}
        sizes |= {"train.global_batch_size": 4, "train.micro_batch_size": 4, "model.seq_length": 64}
    groups |= {"data": "indexed"}
    modes = {"sync": ("1f1b", "none"), "delayed": ("2bw", "none"), "delayed + EF": ("2bw", "error_feedback")}

    def run(optimizer: str, mode: str, steps: int) -> tuple[float, float]:
        schedule, correction = modes[mode]
        chosen = groups | {"optimizer": optimizer, "schedule": schedule, "correction": correction}
        lengths = {"train.steps": steps, "train.warmup_steps": steps // 10}
        _, outcome, seconds = train(place, config_of(place, chosen, sizes | lengths), prepared)
        return outcome.val_loss, seconds

    run("muon", "delayed + EF", 4)
    short, long = (run("muon", "delayed + EF", steps)[1] for steps in (4, 12))
    each = (place.deadline - perf_counter()) / 6 * 0.9
    steps = min(int((each - short) / max((long - short) / 8, 1e-3)), 400 if place.is_gpu else 60)
    if steps < 20:
        yield Line("delay comparison", f"skipped: time for {max(steps, 0)} steps a run only")
        return
    for optimizer in ("adamw", "muon"):
        losses = {mode: run(optimizer, mode, steps)[0] for mode in modes}
        figures = ", ".join(f"{mode} {loss:.4f}" for mode, loss in losses.items())
        yield Line(f"{optimizer}, {steps} steps, validation loss in nats per byte", figures)


CHECKS = {  # in order, with the seconds that each takes about on a GPU
    "what is here": (what_is_here, 5),
    "correctness": (correctness, 20),
    "muon step": (muon_step, 15),
    "utilisation and memory": (utilisations, 90),
    "exposed optimizer": (exposure, 60),
    "side stream": (side_stream, 40),
    "delay comparison": (delay_comparison, 60),
}
