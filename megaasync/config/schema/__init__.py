"""What was asked for: the whole configuration as frozen dataclasses. Field names are the keys that users type.

A file per group; those of the optimizers are in `megaasync.update_rules.kinds`. Keys that came later have a default, so
that YAML files written before them can still be read.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.config.parallel_dims import ParallelDims
from megaasync.config.schema.cluster import ClusterConfig, DockerCluster, LocalCluster, SlurmCluster
from megaasync.config.schema.data import DataConfig, HfData, IndexedData, PythonStdlibData, SyntheticData
from megaasync.config.schema.model import ModelConfig, MoeConfig
from megaasync.config.schema.parallel import ParallelConfig
from megaasync.config.schema.records import CheckpointConfig, LoggingConfig, RunConfig, WandbConfig
from megaasync.config.schema.schedule import CorrectionConfig, ErrorFeedback, NoCorrection, ScheduleConfig, Taylor
from megaasync.config.schema.training import TrainingConfig
from megaasync.fields import ConfigError, OneOf
from megaasync.update_rules import OPTIMIZERS, OptimizerConfig

__all__ = [
    "CheckpointConfig", "ClusterConfig", "Config", "ConfigError", "CorrectionConfig", "DataConfig", "DockerCluster",
    "ErrorFeedback", "HfData", "IndexedData", "LocalCluster", "LoggingConfig", "ModelConfig", "MoeConfig",
    "NoCorrection", "OptimizerConfig", "ParallelConfig", "PythonStdlibData", "RunConfig", "ScheduleConfig",
    "SlurmCluster", "SyntheticData", "Taylor", "TrainingConfig", "WandbConfig",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration of a run.

    Attributes:
        kernels: what layers are computed with: `torch`, `te` for NVIDIA's Transformer Engine, or `auto`, which takes
            the latter for bfloat16 on a GPU where it is installed.
    """

    model: ModelConfig
    optimizer: Annotated[OptimizerConfig, OneOf(tuple(OPTIMIZERS.values()))]
    schedule: ScheduleConfig
    correction: CorrectionConfig
    parallel: ParallelConfig
    train: TrainingConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    cluster: ClusterConfig
    run: RunConfig
    kernels: Literal["auto", "torch", "te"]
    device: Literal["auto", "cpu", "cuda"]
    debug: bool
    dry_run: bool

    @property
    def parallel_dims(self) -> ParallelDims:
        """The mesh of ranks; `auto` counts as 1 until it is resolved."""
        parallel = self.parallel
        data = 1 if parallel.data == "auto" else parallel.data
        return ParallelDims(parallel.pipeline, data, parallel.expert, parallel.tensor)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step, m."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.data_ranks)

    @property
    def data_ranks(self) -> int:
        """Ranks that hold different sequences: data x expert."""
        return self.parallel_dims.size(("data", "expert"))

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return self.parallel_dims.world_size
