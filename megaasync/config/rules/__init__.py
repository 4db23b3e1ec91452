"""Rules that one field alone cannot show, a file per group; all run before anything is started."""

from collections.abc import Callable

from megaasync.config.rules.cluster import check_cluster
from megaasync.config.rules.data import check_data
from megaasync.config.rules.model import check_attention, check_experts
from megaasync.config.rules.parallel import check_batch, check_expert_parallel, check_layout, check_tensor
from megaasync.config.rules.schedule import check_schedule, check_tied_checkpoints
from megaasync.config.rules.training import check_documents, check_kernels, check_restarts
from megaasync.config.schema import Config
from megaasync.fields import check_ranges

RULES: tuple[Callable[[Config], None], ...] = (
    check_ranges,
    check_attention,
    check_experts,
    check_layout,
    check_tensor,
    check_kernels,
    check_documents,
    check_expert_parallel,
    check_cluster,
    check_batch,
    check_schedule,
    check_tied_checkpoints,
    check_restarts,
    check_data,
)


def validate(config: Config) -> Config:
    """Apply every rule; returns the config unchanged.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for rule in RULES:
        rule(config)
    return config
