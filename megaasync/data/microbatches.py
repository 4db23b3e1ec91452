"""Microbatches by address: (step, microbatch) names the same sequences on every rank, at any time, after any resume."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megaasync.data import DataError
from megaasync.data.shuffle import permuted

# B sequences of a microbatch, S tokens of a sequence


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one microbatch feeds to the first and the last stage.

    Attributes:
        tokens_BS: [B, S] int64 inputs.
        labels_BS: [B, S] int64, the inputs shifted by one.
        mask_BS: [B, S] bool, True where the label counts.
        documents_BS: [B, S] int64, which document a token is of; tokens attend within theirs. None for all.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    mask_BS: Tensor
    documents_BS: Tensor | None = None


class MicrobatchSource(Protocol):
    """Anything that gives microbatches by address."""

    def get(self, step: int, microbatch: int) -> Microbatch:
        """The microbatch at this address."""


class TokenSequences:
    """A token stream cut into sequences of S + 1 tokens that overlap by one.

    Attributes:
        num_sequences: how many there are.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seq_length: int,
        vocab_size: int,
        name: str,
        document_ends: np.ndarray | None = None,
    ) -> None:
        """Sequences.

        Args:
            tokens: the stream.
            seq_length: S.
            vocab_size: ids must be below it.
            name: of the stream, for messages.
            document_ends: where each document ends in the stream, if tokens are to attend within theirs only.

        Raises:
            DataError: there is not one sequence in it.
        """
        self._document_ends = document_ends
        self.num_sequences = (len(tokens) - 1) // seq_length
        if self.num_sequences < 1:
            raise DataError(
                f"{name}: has {len(tokens)} tokens, fewer than model.seq_length + 1 = {seq_length + 1}; give more text "
                "or set a smaller model.seq_length"
            )
        self._tokens, self._seq_length, self._vocab_size, self._name = tokens, seq_length, vocab_size, name

    def take(self, indices: np.ndarray) -> np.ndarray:
        """[len(indices), S + 1] int64.

        Raises:
            DataError: a token lies outside the vocabulary.
        """
        length = self._seq_length
        rows = np.stack([self._tokens[i * length : i * length + length + 1] for i in indices]).astype(np.int64)
        if rows.min() < 0 or rows.max() >= self._vocab_size:
            worst = rows.min() if rows.min() < 0 else rows.max()
            raise DataError(
                f"model.vocab_size={self._vocab_size}: {self._name} holds token id {worst}; set a model.vocab_size "
                "above every id, or use files of this tokenizer"
            )
        return rows

    def documents(self, indices: np.ndarray) -> np.ndarray | None:
        """[len(indices), S] int64: the number of the document of each input token; None without documents."""
        if self._document_ends is None:
            return None
        places = indices[:, None] * self._seq_length + np.arange(self._seq_length)
        return np.searchsorted(self._document_ends, places, side="right")

    def microbatch(self, indices: np.ndarray, valid: np.ndarray, device: torch.device) -> Microbatch:
        """Sequences, of which only the valid ones count."""
        rows, documents = self.take(indices), self.documents(indices)
        sequences = torch.from_numpy(rows).to(device)
        mask = torch.from_numpy(valid).to(device)[:, None].expand(-1, rows.shape[1] - 1)
        return Microbatch(
            sequences[:, :-1].contiguous(),
            sequences[:, 1:].contiguous(),
            mask.contiguous(),
            None if documents is None else torch.from_numpy(documents).to(device),
        )


@dataclass(frozen=True, slots=True)
class DataShare:
    """Which of the ranks that hold different sequences this one is: `index` of `count`."""

    index: int = 0
    count: int = 1


WHOLE_BATCH = DataShare()


class TrainingMicrobatches:
    """Sequences in an order shuffled by (seed, epoch); none comes twice within an epoch.

    A step takes the same sequences whatever the number of ranks and the size of a microbatch.
    """

    def __init__(
        self,
        sequences: TokenSequences,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        seed: int,
        device: torch.device,
        share: DataShare = WHOLE_BATCH,
    ) -> None:
        self._sequences, self._device, self._seed = sequences, device, seed
        self._micro, self._share = micro_batch_size, share
        self._per_step = micro_batch_size * num_microbatches * share.count

    def indices(self, step: int, microbatch: int) -> np.ndarray:
        """[B] sequence numbers at this address."""
        first = step * self._per_step + (microbatch * self._share.count + self._share.index) * self._micro
        position = first + np.arange(self._micro)
        epoch, within = np.divmod(position, self._sequences.num_sequences)
        chosen = np.empty(self._micro, dtype=np.int64)
        for number in np.unique(epoch):
            here = epoch == number
            chosen[here] = permuted(
                within[here], size=self._sequences.num_sequences, seed=self._seed, epoch=int(number)
            )
        return chosen

    def get(self, step: int, microbatch: int) -> Microbatch:
        """The microbatch at this address."""
        indices = self.indices(step, microbatch)
        return self._sequences.microbatch(indices, np.ones(len(indices), dtype=bool), self._device)


class ValidationMicrobatches:
    """The first sequences in file order, the same at every evaluation; the last microbatch is padded and masked.

    Attributes:
        num_microbatches: microbatches of one evaluation.
    """

    def __init__(
        self,
        sequences: TokenSequences,
        *,
        micro_batch_size: int,
        limit: int | None,
        device: torch.device,
        share: DataShare = WHOLE_BATCH,
    ) -> None:
        self._sequences, self._micro, self._device, self._share = sequences, micro_batch_size, device, share
        self._count = sequences.num_sequences if limit is None else min(limit, sequences.num_sequences)
        self.num_microbatches = -(-self._count // (micro_batch_size * share.count))

    def get(self, step: int, microbatch: int) -> Microbatch:
        """Microbatch `microbatch`; the step does not matter."""
        index = (microbatch * self._share.count + self._share.index) * self._micro + np.arange(self._micro)
        valid = index < self._count
        return self._sequences.microbatch(np.where(valid, index, 0), valid, self._device)
