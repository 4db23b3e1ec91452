"""What a rank trains on and is validated on, from prepared token files."""

from dataclasses import dataclass

import numpy as np
import torch

from megaasync.config.schema import Config, IndexedData, SyntheticData
from megaasync.data.indexed_dataset import IndexedDataset
from megaasync.data.microbatches import DataShare, TokenSequences, TrainingMicrobatches
from megaasync.data.prepare import PreparedData
from megaasync.data.synthetic import MarkovSource


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a run trains on and is validated on."""

    train: TokenSequences
    validation: TokenSequences | None


def load_tokens(config: Config, prepared: PreparedData) -> Tokens:
    """Cut the tokens into sequences."""

    def cut(tokens: np.ndarray, name: str, document_ends: np.ndarray | None = None) -> TokenSequences:
        return TokenSequences(
            tokens,
            seq_length=config.model.seq_length,
            vocab_size=config.model.vocab_size,
            name=name,
            document_ends=document_ends if config.train.document_mask else None,
        )

    if isinstance(config.data, SyntheticData):
        chain = MarkovSource(
            vocab_size=config.model.vocab_size, branching=config.data.branching, seed=config.train.seed
        )
        held_out = max(config.data.num_tokens // 10, config.model.seq_length + 1)
        return Tokens(
            cut(chain.tokens(num_tokens=config.data.num_tokens, stream=0), "synthetic data"),
            cut(chain.tokens(num_tokens=held_out, stream=1), "synthetic validation data"),
        )
    source = IndexedDataset(prepared.train)
    train = cut(source.tokens, prepared.train, source.document_ends)
    if prepared.validation is None:
        return Tokens(train, None)
    validation = IndexedDataset(prepared.validation)
    is_split = not isinstance(config.data, IndexedData)  # a path given by the user is held to what it says
    too_short = is_split and len(validation.tokens) <= config.model.seq_length
    return Tokens(train, None if too_short else cut(validation.tokens, prepared.validation, validation.document_ends))


def training_source(
    config: Config, tokens: TokenSequences, *, share: DataShare, device: torch.device
) -> TrainingMicrobatches:
    """The microbatches that a rank trains on."""
    return TrainingMicrobatches(
        tokens,
        micro_batch_size=config.train.micro_batch_size,
        num_microbatches=config.num_microbatches,
        seed=config.train.seed,
        device=device,
        share=share,
    )
