"""Check a plan: build the first and the last rank of a layout on fake tensors and count what they hold.

    python -m tools.bench.measure_plan [group=choice] [key=value ...]        as for megaasync.pretrain

Nothing is computed and no memory is taken: tensors are torch's FakeTensors, the other ranks are torch's fake process
group, and every expert gets as many tokens as any other. The product's own code builds stages, versions, gradient sums
and optimizer, and runs one microbatch forward; what autograd saves is counted. Needs train.dtype=bfloat16 for a mixture
of experts, because torch knows the shapes of its grouped matmul in that dtype only.
"""

import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaasync.config import Config, ConfigError, phases_of, read, validate
from megaasync.config.parallel_dims import local_range
from megaasync.data.microbatches import Microbatch
from megaasync.distributed.mesh import Mesh
from megaasync.entry.hydra_app import CONFIG_ERROR_STATUS, fail
from megaasync.nn.moe import MoE
from megaasync.nn.recompute import Recompute
from megaasync.nn.token_dispatcher import TokenDispatcher
from megaasync.pipeline.stage_compute import StageCompute
from megaasync.plan.plan import make_plan
from megaasync.plan.sizes import DTYPES, buffers_required
from megaasync.pretrain import resolve_data
from megaasync.train.groups import make_groups
from megaasync.train.stages import build_stage

from ..command_line import run_config_tool

_CPU = torch.device("cpu")


class _Balanced(TokenDispatcher):
    """Every rank gets as many rows as any other: fake tensors have no values to count."""

    def split_sizes(self, sent_XE: Tensor, received_XE: Tensor) -> tuple[list[int], list[int]]:
        """Even ones."""
        ranks = sent_XE.shape[0]
        sizes = [len(local_range(self.num_rows, index=rank, count=ranks)) for rank in range(ranks)]
        return sizes, sizes


def _balance(stage: StageCompute, num_rows: int) -> None:
    for module in stage.versions.modules:
        for layer in module.modules():
            if isinstance(layer, MoE):
                layer._dispatcher.__class__ = _Balanced
                layer._dispatcher.num_rows = num_rows


@dataclass
class _Saved:
    """Bytes of storages that autograd saves, each once, weights and buffers left out."""

    known: set[int]
    total: int = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """A hook of autograd."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.total += storage.nbytes()
        return tensor


class _Watched(Recompute):
    """Its hooks hide those around it, so it reports what it keeps by itself."""

    @staticmethod
    def storage_key(tensor: Tensor) -> tuple[Any, ...]:
        """Fake tensors have storages without an address."""
        return tensor.untyped_storage()._cdata, tensor.numel(), tensor.dtype, tensor.is_contiguous()

    def pack_hook(self, tensor: Tensor) -> Any:
        """As it is kept."""
        kept = super().pack_hook(tensor)
        return self.saved.pack(kept) if isinstance(kept, Tensor) else kept

    def layer(self, module: torch.nn.Module, x: Tensor, *others: Any) -> Tensor:
        """A whole layer keeps what it is given."""
        if self.mode == "full":
            self.saved.pack(x)
        return super().layer(module, x, *others)


def _watch_recomputation(module: torch.nn.Module, saved: _Saved) -> None:
    for submodule in module.modules():
        for name in ("recompute", "_recompute"):
            found = getattr(submodule, name, None)
            if isinstance(found, Recompute):
                found.__class__, found.saved = _Watched, saved


def _activations(stage: StageCompute, config: Config) -> int:
    """Bytes of one microbatch."""
    train, model, parallel = config.train, config.model, config.parallel
    parts = parallel.tensor if parallel.sequence_parallel else 1
    shape = (train.micro_batch_size, model.seq_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    documents = tokens.clone() if train.document_mask else None
    microbatch = Microbatch(tokens, tokens.clone(), torch.ones(shape, dtype=torch.bool), documents)
    x = None
    if not stage.place.is_first:
        x = torch.zeros((shape[0], shape[1] // parts, model.hidden_size), dtype=DTYPES[train.dtype]).requires_grad_()
    module = stage.versions.module(0)
    known = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    saved = _Saved(known)
    _watch_recomputation(module, saved)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        module(x, microbatch)
    return saved.total


def measure_rank(config: Config, rank: int) -> dict[str, int]:
    """Bytes by kind that a rank holds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
    try:
        phases = phases_of(config)
        schedule, needs = phases[0].schedule, buffers_required(phases)
        mesh = Mesh(config.parallel_dims, rank=rank, device_type="cpu", timeout=timedelta(seconds=60))
        groups = make_groups(mesh, schedule)
        found = dict.fromkeys(("weights", "gradients", "master", "optimizer_state", "activations"), 0)
        tokens = config.train.micro_batch_size * config.model.seq_length // config.parallel.tensor
        with FakeTensorMode(allow_non_fake_inputs=True):
            for index in schedule.stages_of(mesh.coordinate("pipeline")):
                stage, update = build_stage(config, schedule, needs, index=index, mesh=mesh, groups=groups, device=_CPU)
                if config.model.moe:
                    _balance(stage, tokens * config.model.moe.top_k)
                versions = range(stage.versions.num_slots)
                found["weights"] += sum(stage.versions.flat(version).nbytes for version in versions)
                found["gradients"] += sum(
                    stage.gradients.sum_of(i).nbytes for i in range(needs.gradient_buffers[index])
                )
                found["master"] += update.master.nbytes
                found["optimizer_state"] += update.optimizer.state_bytes
                found["activations"] += _activations(stage, config) * needs.activations[index]
        return found
    finally:
        dist.destroy_process_group()


def planned_rank(config: Config, rank: int) -> dict[str, int]:
    """The same by the plan, whose figures are of the rank with most among those of a stage."""
    schedule, found = phases_of(config)[0].schedule, {}
    mine = schedule.stages_of(config.parallel_dims.coordinate(rank, "pipeline"))
    for line in make_plan(config)["stages"]:
        if line["stage"] in mine:
            for kind, count in line["bytes"].items():
                found[kind] = found.get(kind, 0) + count
    del found["workspace"]  # not held
    return found


def measure(plain: dict[str, Any]) -> None:
    """Measure, print, and end with status 1 if a total differs by more than a tenth."""
    try:
        config = validate(resolve_data(read(Config, plain), None))
        if config.model.moe and config.train.dtype != "bfloat16":
            raise ConfigError(
                f"train.dtype={config.train.dtype}: experts can be measured in bfloat16 only; set train.dtype=bfloat16"
            )
    except ConfigError as error:
        fail(str(error), status=CONFIG_ERROR_STATUS)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # by torch's own deepcopy
    is_near = True
    for rank in dict.fromkeys((0, config.world_size - 1)):
        planned, measured = planned_rank(config, rank), measure_rank(config, rank)
        table = Table("kind", "planned", "measured", "ratio", title=f"rank {rank} of {config.world_size}, MiB")
        planned["total"], measured["total"] = sum(planned.values()), sum(measured.values())
        for kind, count in planned.items():
            ratio = count / measured[kind] if measured[kind] else float("nan")
            table.add_row(kind, f"{count / 2**20:,.1f}", f"{measured[kind] / 2**20:,.1f}", f"{ratio:.3f}")
        Console().print(table)
        is_near &= abs(planned["total"] / measured["total"] - 1) <= 0.1
    if not is_near:
        fail("plan and measurement differ by more than a tenth", status=1)


def main() -> None:
    """Entry point."""
    run_config_tool(measure, __doc__)


if __name__ == "__main__":
    main()
