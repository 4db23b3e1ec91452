"""Optimizers: group `optimizer`, one dataclass each."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megaasync.config.schema.ranges import Range


@dataclass(frozen=True, slots=True)
class SgdConfig:
    """Stochastic gradient descent, for checks: u = lr (g + weight_decay z); `momentum` mu as Muon's, 0 for none."""

    name: Literal["sgd"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    momentum: Annotated[float, Range(at_least=0, below=1)]


@dataclass(frozen=True, slots=True)
class AdamWConfig:
    """AdamW (arXiv 1711.05101): decoupled weight decay."""

    name: Literal["adamw"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]


@dataclass(frozen=True, slots=True)
class MuonConfig:
    """Muon for matrices, AdamW for the rest, one lr for both through the 0.2 sqrt(max(rows, cols)) scale.

    Attributes:
        momentum: mu of the moving average, Nesterov form.
        newton_schulz_steps: iterations of the orthogonalisation.
        newton_schulz_precision: of its products; `auto` is bfloat16 on GPUs, unless the run is in float64.
        betas, eps: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["muon"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    momentum: Annotated[float, Range(at_least=0, below=1)]
    newton_schulz_steps: Annotated[int, Range(at_least=1)]
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]


@dataclass(frozen=True, slots=True)
class NAdamConfig:
    """NAdam: AdamW with a momentum that looks ahead; `momentum_decay` as torch's, 0.004 there."""

    name: Literal["nadam"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]
    momentum_decay: Annotated[float, Range(at_least=0)]


@dataclass(frozen=True, slots=True)
class LionConfig:
    """Lion (arXiv 2302.06675): wants an lr 3 to 10 times smaller than AdamW's and as much more decay."""

    name: Literal["lion"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]


@dataclass(frozen=True, slots=True)
class AdanConfig:
    """Adan (arXiv 2208.06677) with decoupled decay."""

    name: Literal["adan"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    betas: Annotated[tuple[float, float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]


@dataclass(frozen=True, slots=True)
class NorMuonConfig:
    """NorMuon (arXiv 2510.05491) for matrices, AdamW for the rest.

    Attributes:
        momentum, newton_schulz_steps, newton_schulz_precision: as muon's.
        beta2: of the second moment of the rows.
        betas, eps: of AdamW; eps also of the rows.
    """

    name: Literal["normuon"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    momentum: Annotated[float, Range(at_least=0, below=1)]
    newton_schulz_steps: Annotated[int, Range(at_least=1)]
    newton_schulz_precision: Literal["auto", "float32", "bfloat16"]
    beta2: Annotated[float, Range(at_least=0, below=1)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]


@dataclass(frozen=True, slots=True)
class MarsConfig:
    """MARS-AdamW (arXiv 2411.10438) for matrices, AdamW for the rest.

    Attributes:
        betas: of the corrected gradient.
        gamma: strength of the correction by the gradient before.
        adamw_betas: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["mars"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    gamma: Annotated[float, Range(at_least=0)]
    adamw_betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]


@dataclass(frozen=True, slots=True)
class SoapConfig:
    """SOAP (arXiv 2409.11321) for matrices, AdamW for the rest.

    Attributes:
        betas: of the moments in the eigenbasis; the second one also of the preconditioner.
        refresh_interval: updates between steps of the eigenbases.
        first_basis: gradients that are gathered, without an update, before the first eigenbasis.
        largest_side: rows or columns above which a side keeps its own axes.
        adamw_betas: of AdamW for embeddings, head, router and norms.
    """

    name: Literal["soap"]
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    refresh_interval: Annotated[int, Range(at_least=1)]
    first_basis: Annotated[int, Range(at_least=1)]
    largest_side: Annotated[int, Range(at_least=1)]
    adamw_betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]


@dataclass(frozen=True, slots=True)
class TorchOptimizerConfig:
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
    lr: Annotated[float, Range(at_least=0)]
    weight_decay: Annotated[float, Range(at_least=0)]
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)]
    eps: Annotated[float, Range(above=0)]


OptimizerConfig = (
    SgdConfig
    | AdamWConfig
    | NAdamConfig
    | LionConfig
    | AdanConfig
    | MuonConfig
    | NorMuonConfig
    | MarsConfig
    | SoapConfig
    | TorchOptimizerConfig
)
