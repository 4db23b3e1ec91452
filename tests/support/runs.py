"""A real run on real gloo ranks that returns its rows and weights instead of writing a folder."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaasync.config import Config
from megaasync.data.prepare import PreparedData
from megaasync.distributed.environment import RankEnvironment
from megaasync.distributed.groups import join_group, leave_group
from megaasync.entry.spawn import spawn_ranks
from megaasync.models.parameters import sharding_of
from megaasync.train.build import CheckpointFiles, build_trainer


@dataclass
class RunNumbers:
    """Rows of metrics, final master weights by parameter name, and the outcome's validation loss."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    val_loss: float | None = None
    said: list[str] = field(default_factory=list)

    def on_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def column(self, name: str) -> np.ndarray:
        return np.array([row[name] for row in self.rows if row["kind"] == "train"])


def run_rank(
    environment: RankEnvironment,
    config: Config,
    root: Path | None = None,
    resume: Path | None = None,
    prepared: PreparedData | None = None,
) -> RunNumbers:
    """Train on this rank and collect; checkpoints go below `root`."""
    device = torch.device("cpu")
    join_group(environment, device=device, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    numbers = RunNumbers()
    trainer = build_trainer(
        config,
        environment=environment,
        prepared=prepared or PreparedData(None, None, None),
        device=device,
        observer=numbers,
        files=root and CheckpointFiles(root, resume, numbers.said.append),
    )
    numbers.val_loss = trainer.train().val_loss
    for stage in trainer.executor.runner.stages.values():
        layout = stage.optimizer.layout
        for name, weight in zip(layout.names, layout.views(stage.whole_master()), strict=True):
            twin = numbers.weights.setdefault(name, weight.numpy().copy())
            assert (twin == weight.numpy()).all(), f"the two copies of {name} differ"
    leave_group()
    return numbers


def put_together(parts: list[RunNumbers], config: Config) -> dict[str, np.ndarray]:
    """Whole weights from every rank's parts; ranks that hold the same part must agree to the bit."""
    mesh, by_place = config.parallel_dims, {}
    for rank, part in enumerate(parts):
        for name, weight in part.weights.items():
            sharding = sharding_of(name, sequence_parallel=config.parallel.sequence_parallel)
            place = 0 if sharding.axis is None else mesh.coordinate(rank, sharding.axis)
            twin = by_place.setdefault(name, {}).setdefault(place, weight)
            assert (twin == weight).all(), f"the copies of {name} on several ranks differ"
    return {
        name: np.concatenate([places[i] for i in sorted(places)], axis=sharding_of(name, sequence_parallel=False).dim)
        if len(places) > 1
        else places[0]
        for name, places in by_place.items()
    }


CLOCKS = ("tokens_per_second", "seconds", "time")


def _stable(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in CLOCKS}


def run(config: Config, root: Path | None = None, resume: Path | None = None) -> RunNumbers:
    """Train on as many ranks as the config says; weights of all stages are put together, rows are rank 0's.

    Checkpoints go below `root`; `resume` is one to go on from.
    """
    parts = spawn_ranks(run_rank, (config, root, resume), world_size=config.world_size)
    whole = parts[0]
    for part in parts[1:]:
        assert [_stable(r) for r in part.rows] == [_stable(r) for r in whole.rows], "ranks disagree about the metrics"
    whole.weights = put_together(parts, config)
    return whole


def assert_same_run(left: RunNumbers, right: RunNumbers, *, tolerance: float) -> None:
    """All numbers of all rows, and final weights, agree relative to their size."""
    assert len(left.rows) == len(right.rows)
    for mine, other in zip(map(_stable, left.rows), map(_stable, right.rows), strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            if isinstance(value, float):
                np.testing.assert_allclose(other[name], value, rtol=tolerance, atol=0, err_msg=f"{name} of {mine}")
            else:
                assert other[name] == value, (name, mine, other)
    np.testing.assert_allclose(left.val_loss, right.val_loss, rtol=tolerance)
    assert left.weights.keys() == right.weights.keys()
    for name, weight in left.weights.items():
        scale = np.abs(weight).max()
        np.testing.assert_allclose(weight, right.weights[name], rtol=0, atol=tolerance * scale, err_msg=name)
