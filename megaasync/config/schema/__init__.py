"""What was asked for: the whole configuration as frozen dataclasses. Field names are the keys that users type.

A file per group. Keys that came later have a default, so that whole YAML files of users from before still do.
"""

from dataclasses import dataclass
from typing import Literal

from megaasync.config.error import ConfigError
from megaasync.config.parallel_dims import ParallelDims
from megaasync.config.schema.cluster import ClusterConfig, DockerCluster, LocalCluster, SlurmCluster
from megaasync.config.schema.data import DataConfig, HfData, IndexedData, PythonStdlibData, SyntheticData
from megaasync.config.schema.model import ModelConfig, MoeConfig
from megaasync.config.schema.optimizer import (
    AdamWConfig,
    AdanConfig,
    LionConfig,
    MarsConfig,
    MuonConfig,
    NAdamConfig,
    NorMuonConfig,
    OptimizerConfig,
    SgdConfig,
    SoapConfig,
    TorchOptimizerConfig,
)
from megaasync.config.schema.parallel import ParallelConfig
from megaasync.config.schema.records import CheckpointConfig, LoggingConfig, RunConfig, WandbConfig
from megaasync.config.schema.schedule import CorrectionConfig, ErrorFeedback, NoCorrection, ScheduleConfig, Taylor
from megaasync.config.schema.training import TrainingConfig

__all__ = [
    "AdamWConfig", "AdanConfig", "CheckpointConfig", "ClusterConfig", "Config", "ConfigError", "CorrectionConfig",
    "DataConfig", "DockerCluster", "ErrorFeedback", "HfData", "IndexedData", "LionConfig", "LocalCluster",
    "LoggingConfig", "MarsConfig", "ModelConfig", "MoeConfig", "MuonConfig", "NAdamConfig", "NoCorrection",
    "NorMuonConfig", "OptimizerConfig", "ParallelConfig", "PythonStdlibData", "RunConfig", "ScheduleConfig",
    "SgdConfig", "SlurmCluster", "SoapConfig", "SyntheticData", "Taylor", "TorchOptimizerConfig", "TrainingConfig",
    "WandbConfig",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration of a run.

    Attributes:
        kernels: what layers are computed with: `torch`, `te` for NVIDIA's Transformer Engine, or `auto`, which takes
            the latter for bfloat16 on a GPU where it is installed.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
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
