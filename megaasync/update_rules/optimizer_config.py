"""What every optimizer of the config is: a name, a learning rate, a weight decay, and the rules that they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from megaasync.fields import Range

if TYPE_CHECKING:
    from megaasync.update_rules.update_rule import UpdateRule


@dataclass(frozen=True, slots=True)
class Rules:
    """The update rules of an optimizer.

    Attributes:
        elements: steps flat runs of elements: embeddings, head, router, norms, and matrices if they have no rule.
        matrices: steps hidden and expert matrices, each whole; None leaves them to `elements`.
    """

    elements: UpdateRule
    matrices: UpdateRule | None = None


@dataclass(frozen=True, slots=True)
class OptimizerConfig(ABC):
    """The keys that all optimizers share; a subclass adds its own and declares `name` as a Literal.

    Attributes:
        lr: peak learning rate.
        weight_decay: decoupled, u = lr (direction + weight_decay z).
    """

    name: str
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]

    @abstractmethod
    def rules(self) -> Rules:
        """The update rules with these values."""
