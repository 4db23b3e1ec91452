"""Sharded state dicts to and from a folder, by torch.distributed.checkpoint."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megaasync.checkpoint.stage_state import ShardedStateDict
from megaasync.checkpoint.storage import JsonReader, JsonWriter, read_metadata
from megaasync.config.schema import ConfigError


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].chunks[tuple(index.offset)]


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        there = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, pieces in self.state_dict.items()
                for item in create_read_items_for_chunk_list(name, there[name], pieces.chunk_metadata())
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].chunks[tuple(index.offset)]


def write(entries: ShardedStateDict, folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Write all ranks' entries; equal pieces of several ranks once. All ranks of the group call it together.

    Raises:
        Exception: on every rank, if any rank could not write.
    """
    writer = JsonWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=True)
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single process saves without a group, on purpose
        dcp.save(entries, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def tensors_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Global shapes of the tensors of a checkpoint, by name."""
    metadata = read_metadata(folder)
    return {name: tuple(tensor.size) for name, tensor in metadata.state_dict_metadata.items()}


def load(entries: ShardedStateDict, folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Read into the entries' views, whatever layout wrote the folder. All ranks of the group call it together.

    Raises:
        ConfigError: an entry is not there, or has another shape.
    """
    there = tensors_in(folder)
    for name, pieces in entries.items():
        if name not in there:
            raise ConfigError(f"checkpoint {folder}: has no {name}, so another model or optimizer made it")
        if there[name] != pieces.shape:
            raise ConfigError(
                f"checkpoint {folder}: {name} has shape {list(there[name])}, but {list(pieces.shape)} here; it is of "
                "another model"
            )
    state: dict[str, Any] = dict(entries)
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    reader = JsonReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # no Exception
            cause = next((failure for failure, _ in error.failures.values()), error)
            raise ConfigError(
                f"checkpoint {folder}: cannot be read ({str(cause).strip().splitlines()[-1]}); take an older one with "
                "checkpoint.resume=FOLDER"
            ) from None
