"""The state of one stage on one rank as named pieces of global tensors: views, so that loading writes in place.

Names: `master/P` z, `weights/K/P` the published version that batch N + K runs on, `gradient/K/P` the summed gradient
of pending batch N - K, `state/P/S` tensor S of the optimizer's rule, `memory/P/S` of the delay compensation,
`router/L/bias`, `router/L/fractions`, `router/L/counts/K` of layer L's router; P is a parameter's name in the whole
model, N the batches done.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megaasync.checkpoint.chunks import TensorChunks
from megaasync.distributed.sharding import Shape
from megaasync.optim.flat_param_layout import ParamGroup
from megaasync.pipeline.stage_update import StageUpdate

ShardedStateDict = dict[str, TensorChunks]


class StageState:
    """Names the parts of a stage's state.

    Attributes:
        stage: whose.
    """

    def __init__(
        self,
        stage: StageUpdate,
        *,
        shapes: Mapping[str, Shape],
        parts: Mapping[str, Sequence[range]],
        router_layers: Sequence[int],
    ) -> None:
        """A view of a stage.

        Args:
            stage: of this rank.
            shapes: of the whole parameters, by name.
            parts: what this rank has of each.
            router_layers: numbers in the whole model of the layers with routers, in their order.
        """
        self.stage, self._shapes, self._router_layers = stage, shapes, router_layers
        self._local_shapes = {name: tuple(map(len, part)) for name, part in parts.items()}
        self._offsets = {name: tuple(side.start for side in part) for name, part in parts.items()}
        layout = stage.optimizer.layout
        self._places = sorted((layout.place_of(name).start, layout.place_of(name).stop, name) for name in shapes)

    def _members(self, run: ParamGroup) -> Iterator[tuple[str, int, int, int]]:
        """(parameter, its first element here, first and last element in the run)."""
        for start, stop, name in self._places:
            low, high = max(start, run.start), min(stop, run.end)
            if low < high:
                yield name, low - start, low - run.start, high - run.start

    def _flat(self, entries: ShardedStateDict, prefix: str, run: ParamGroup, tensor: Tensor, suffix: str = "") -> None:
        """Chunks of a contiguous tensor with one element per element of the run."""
        flat = tensor.view(-1)
        for name, first, low, high in self._members(run):
            pieces = entries.setdefault(f"{prefix}/{name}{suffix}", TensorChunks(self._shapes[name], tensor.dtype))
            pieces.add_run(
                flat[low:high],
                local_shape=self._local_shapes[name],
                local_offsets=self._offsets[name],
                start=first,
            )

    def _matrices(self, run: ParamGroup) -> list[tuple[str, int]]:
        """(parameter, place in the whole stack) of the whole matrices that this rank's rule steps, in their order."""
        rows, cols = run.matrix_shape
        found = []
        for name, first, low, high in self._members(run):
            for number in range((high - low) // (rows * cols)):
                is_stack = len(self._shapes[name]) == 3
                found.append((name, self._offsets[name][0] + first // (rows * cols) + number if is_stack else 0))
        if run.owners is None:
            return found
        before = sum(run.owners.counts[: run.owners.index])
        return found[before : before + run.owners.counts[run.owners.index]]

    def _of_matrices(self, entries: ShardedStateDict, run: ParamGroup, key: str, tensor: Tensor) -> None:
        """Chunks of a rule's state [n, ...] of n whole matrices."""
        for number, (name, place) in enumerate(self._matrices(run)):
            one, is_stack = tensor[number], len(self._shapes[name]) == 3
            shape = (self._shapes[name][0], *one.shape) if is_stack else tuple(one.shape)
            offsets = (place, *(0,) * one.dim()) if is_stack else (0,) * one.dim()
            pieces = entries.setdefault(f"state/{name}/{key}", TensorChunks(shape, tensor.dtype))
            pieces.chunks[offsets] = one.unsqueeze(0) if is_stack else one

    def optimizer_entries(self) -> ShardedStateDict:
        """Masters, states, memories and routers: all but what the delay leaves pending."""
        optimizer, entries = self.stage.optimizer, {}
        for run, state, memory in zip(optimizer.layout.groups, optimizer.states, optimizer.memories, strict=True):
            self._flat(entries, "master", run, run.view_shard(optimizer.master))
            for key, tensor in memory.items():
                self._flat(entries, "memory", run, tensor, f"/{key}")
            for key, tensor in state.items():
                if tensor.numel() == 0:
                    continue
                if run.matrix_shape is None:
                    self._flat(entries, "state", run, tensor, f"/{key}")
                else:
                    self._of_matrices(entries, run, key, tensor)
        balance = self.stage.balance
        if balance is not None:
            for layer, bias, fractions in zip(self._router_layers, balance.bias_LE, balance.fractions_LE, strict=True):
                entries[f"router/{layer}/bias"] = _whole(bias)
                entries[f"router/{layer}/fractions"] = _whole(fractions)
        return entries

    def version_entries(self, *, version: int, number: int) -> ShardedStateDict:
        """Shards of a published version, to be gathered after a load."""
        entries: ShardedStateDict = {}
        for run in self.stage.optimizer.layout.groups:
            self._flat(entries, f"weights/{number}", run, run.view(self.stage.versions.flat(version)))
        return entries

    def gradient_entries(self, *, step: int, number: int) -> ShardedStateDict:
        """Shards of the summed gradient of a pending batch, and its experts' loads."""
        entries: ShardedStateDict = {}
        for run in self.stage.optimizer.layout.groups:
            self._flat(entries, f"gradient/{number}", run, run.view(self.stage.gradients.sum_of(step)))
        if self.stage.balance is not None:
            for layer, counts in zip(self._router_layers, self.stage.balance.counts(step), strict=True):
                entries[f"router/{layer}/counts/{number}"] = _whole(counts)
        return entries


def _whole(tensor: Tensor) -> TensorChunks:
    return TensorChunks(tuple(tensor.shape), tensor.dtype, {(0,) * tensor.dim(): tensor})


def merge_state_dicts(parts: Sequence[ShardedStateDict]) -> ShardedStateDict:
    """ShardedStateDict of several stages of a rank; a tied embedding is in two of them, equal."""
    entries: ShardedStateDict = {}
    for part in parts:
        for name, pieces in part.items():
            entries.setdefault(name, TensorChunks(pieces.shape, pieces.dtype)).chunks.update(pieces.chunks)
    return entries


def bytes_of(entries: ShardedStateDict) -> int:
    """Bytes of this rank's chunks of all tensors."""
    return sum(pieces.nbytes for pieces in entries.values())


def to_host(entries: ShardedStateDict) -> ShardedStateDict:
    """The one copy that a save makes the pipeline wait for."""
    with torch.no_grad():
        return {name: pieces.to_host() for name, pieces in entries.items()}
