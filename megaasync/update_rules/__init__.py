"""Optimizers: a file each with its config keys and its recurrence, found by the catalog.

Read together with the config, so nothing here imports torch before a rule is used.
"""

from megaasync.update_rules.catalog import OPTIMIZERS
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules

__all__ = ["OPTIMIZERS", "OptimizerConfig", "Rules"]
