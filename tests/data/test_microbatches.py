"""Microbatches by address: shuffling, epochs, shares, validation; and the synthetic source."""

import numpy as np
import pytest
import torch

from megaasync.data import DataError
from megaasync.data.microbatches import TokenSequences, TrainingMicrobatches, ValidationMicrobatches
from megaasync.data.shuffle import permuted
from megaasync.data.synthetic import MarkovSource

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000, 4099])
def test_shuffling_is_a_bijection_that_differs_by_seed_and_epoch(size):
    positions = np.arange(size)
    shuffles = {
        (seed, epoch): permuted(positions, size=size, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1)
    }
    for shuffle in shuffles.values():
        assert sorted(shuffle) == positions.tolist()
    if size >= 64:
        assert len({tuple(s) for s in shuffles.values()}) == 4
    whole = shuffles[0, 0]
    assert [int(permuted(np.array([i]), size=size, seed=0, epoch=0)[0]) for i in range(min(size, 20))] == whole[
        :20
    ].tolist()


def test_shuffling_looks_random():
    """Neighbours end far apart, and every tenth of the input reaches every tenth of the output about evenly."""
    size = 10_000
    shuffle = permuted(np.arange(size), size=size, seed=3, epoch=0)
    assert abs(np.corrcoef(np.arange(size), shuffle)[0, 1]) < 0.03
    table = np.histogram2d(np.arange(size), shuffle, bins=10)[0]
    assert 60 < table.min() and table.max() < 140


def source(num_tokens=103, seq_length=5, micro=2, m=3, seed=0):
    sequences = TokenSequences(np.arange(num_tokens), seq_length=seq_length, vocab_size=num_tokens, name="test")
    return sequences, TrainingMicrobatches(sequences, micro_batch_size=micro, num_microbatches=m, seed=seed, device=CPU)


def test_an_epoch_holds_every_sequence_once_and_epochs_differ():
    sequences, batches = source()
    assert sequences.num_sequences == 20
    order = np.concatenate([batches.indices(step, mb) for step in range(10) for mb in range(3)])  # three epochs
    epochs = order.reshape(3, 20)
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_address_gives_the_same_microbatch_in_any_order_and_process():
    _, first = source(seed=4)
    _, second = source(seed=4)
    addresses = [(s, mb) for s in range(6) for mb in range(3)]
    straight = {a: first.get(*a).tokens_BS for a in addresses}
    for address in reversed(addresses):
        assert torch.equal(second.get(*address).tokens_BS, straight[address])


def test_the_split_into_microbatches_does_not_change_the_global_batch():
    _, wide = source(micro=6, m=1)
    _, narrow = source(micro=1, m=6)
    for step in range(5):
        together = np.concatenate([narrow.indices(step, mb) for mb in range(6)])
        assert np.array_equal(wide.indices(step, 0), together)


def test_labels_are_the_next_tokens():
    _, batches = source()
    microbatch = batches.get(0, 0)
    assert torch.equal(microbatch.labels_BS, microbatch.tokens_BS + 1)
    assert microbatch.mask_BS.all()


def test_validation_is_the_same_each_time_and_pads_the_last_microbatch():
    sequences, _ = source()
    validation = ValidationMicrobatches(sequences, micro_batch_size=6, limit=None, device=CPU)
    assert validation.num_microbatches == 4
    masks = [validation.get(0, i).mask_BS for i in range(4)]
    assert int(sum(m.sum() for m in masks)) == 20 * 5
    seen = torch.cat([validation.get(0, i).tokens_BS[:, 0] for i in range(4)])[:20]
    assert torch.equal(seen, torch.arange(0, 100, 5))
    assert ValidationMicrobatches(sequences, micro_batch_size=6, limit=7, device=CPU).num_microbatches == 2


def test_too_little_text_and_too_small_a_vocabulary_are_named():
    with pytest.raises(DataError, match=r"fewer than model\.seq_length \+ 1 = 9"):
        TokenSequences(np.arange(8), seq_length=8, vocab_size=10, name="x")
    sequences = TokenSequences(np.arange(30), seq_length=4, vocab_size=10, name="x")
    with pytest.raises(DataError, match=r"model\.vocab_size=10"):
        sequences.take(np.array([5]))


def test_markov_source_is_seeded_and_has_the_entropy_it_says():
    chain = MarkovSource(vocab_size=50, branching=3, seed=1)
    tokens = chain.tokens(num_tokens=60_000, stream=0)
    again = MarkovSource(vocab_size=50, branching=3, seed=1).tokens(num_tokens=60_000, stream=0)
    assert np.array_equal(tokens, again)
    assert not np.array_equal(tokens[:1000], chain.tokens(num_tokens=1000, stream=1))
    counts = np.zeros((50, 50))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    p = counts / counts.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        conditional = -np.nansum(counts * np.log(p)) / counts.sum()
    assert conditional == pytest.approx(chain.entropy, abs=0.02)
