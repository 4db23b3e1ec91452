"""Any optimizer class of PyTorch or of a library, by its importable name."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megaasync.fields import Range
from megaasync.update_rules.kinds.adamw import AdamW
from megaasync.update_rules.optimizer_config import OptimizerConfig, Rules


@dataclass(frozen=True, slots=True)
class TorchOptimizerConfig(OptimizerConfig):
    """Any `torch.optim.Optimizer`, delayed and corrected like ours.

    Attributes:
        target: importable name of the class, as torch.optim.RMSprop.
        arguments: of its construction, without lr and weight_decay.
        elementwise: it steps every parameter; otherwise hidden and expert matrices, each whole, and AdamW the rest.
        betas, eps: of that AdamW.
    """

    name: Literal["torch"]
    target: str
    arguments: dict[str, Any]
    elementwise: bool
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]

    def rules(self) -> Rules:
        """The class for every parameter, or for matrices with AdamW for the rest."""
        from megaasync.update_rules.torch_optimizer import torch_optimizer_rule

        rule = torch_optimizer_rule(self.target, self.arguments, is_matrix_rule=not self.elementwise)
        return Rules(rule) if self.elementwise else Rules(AdamW(self.betas, self.eps), rule)
