"""Attention within documents: packed documents give what each gives by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megaasync.config import ConfigError
from megaasync.data import DataError
from megaasync.data.indexed_dataset import MAGIC, IndexedDataset, IndexedWriter
from megaasync.data.microbatches import Microbatch, TokenSequences
from megaasync.data.prepare import PreparedData
from megaasync.entry.spawn import spawn_ranks
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import DecoderStage
from megaasync.plan.plan import make_plan
from tests.support.configs import small_config
from tests.support.runs import assert_same_run, put_together, run_rank
from tests.support.te_stand_in import Recorder, install

LENGTHS = [5, 1, 9, 3, 6]


@pytest.mark.parametrize("moe", [True, False], ids=["experts", "dense"])
def test_packed_documents_are_documents(moe):
    """The sum of losses of two packed sequences, and all gradients, against one forward per piece of a document."""
    config = small_config(model__seq_length=12, **({} if moe else {"model__moe": None})).model
    torch.set_default_dtype(torch.float64)
    try:
        model = DecoderStage(config, range(config.num_layers))
    finally:
        torch.set_default_dtype(torch.float32)
    initialize_(dict(model.named_parameters()), config, seed=0)
    tokens = torch.randint(config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    labels, mask = tokens.roll(-1, dims=1), torch.ones_like(tokens, dtype=torch.bool)
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS)).view(2, 12)

    def gradients(loss):
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    packed = gradients(model(None, Microbatch(tokens, labels, mask, documents)))
    pieces = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for document in documents[row].unique():
            here = documents[row] == document
            piece = (token[row][here].unsqueeze(0) for token in (tokens, labels, mask))
            pieces = pieces + model(None, Microbatch(*piece))
    alone = gradients(pieces)
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-12, atol=0)
    for ours, theirs in zip(packed[1], alone[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    whole = model(None, Microbatch(tokens, labels, mask))
    assert abs(whole.item() / packed[0].item() - 1) > 1e-4  # the mask does something


def test_documents_are_those_of_the_file():
    ends = np.cumsum(LENGTHS)
    sequences = TokenSequences(np.arange(24), seq_length=4, vocab_size=24, name="x", document_ends=ends)
    numbers = np.repeat(np.arange(5), LENGTHS)
    for index in range(5):
        np.testing.assert_array_equal(sequences.documents(np.array([index]))[0], numbers[4 * index : 4 * index + 4])
    plain = TokenSequences(np.arange(24), seq_length=4, vocab_size=24, name="x")
    assert plain.documents(np.array([0])) is None


def test_documents_of_several_sequences_are_whole(tmp_path):
    """As Megatron's preprocessing writes them, split into sentences."""
    prefix = tmp_path / "x"
    with IndexedWriter(prefix, vocab_size=24) as writer:
        for length in LENGTHS:
            writer.add_document(np.zeros(length, dtype=int))
    index = prefix.with_name("x.idx")
    raw = bytearray(index.read_bytes())
    whole = len(raw) - 8 * 6
    firsts = np.array([0, 2, 5], dtype="<i8")  # two documents: of two sequences, and of three
    raw[whole:] = firsts.tobytes()
    place = len(MAGIC) + 8 + 1 + 8  # behind version, dtype code and the count of sequences
    raw[place : place + 8] = np.array([3], dtype="<u8").tobytes()
    index.write_bytes(bytes(raw))
    np.testing.assert_array_equal(IndexedDataset(prefix).document_ends, [6, 24])
    raw[whole : whole + 8] = np.array([1], dtype="<i8").tobytes()
    index.write_bytes(bytes(raw))
    with pytest.raises(DataError, match="its documents are not those of its 5 sequences"):
        IndexedDataset(prefix)


def file_of_documents(folder):
    draw = np.random.default_rng(0)
    for name in ("train", "validation"):
        with IndexedWriter(folder / name, vocab_size=64) as writer:
            for _ in range(300):
                writer.add_document(draw.integers(0, 64, draw.integers(1, 12)))
    return PreparedData(folder / "train", folder / "validation", None)


def documents_rank(environment, config, prepared, engine):
    if engine:
        install(Recorder())
    return run_rank(environment, config, prepared=prepared)


def run_on(config, prepared, engine=False):
    parts = spawn_ranks(documents_rank, (config, prepared, engine), world_size=config.world_size)
    parts[0].weights = put_together(parts, config)
    return parts[0]


def config_of(prepared, **overrides):
    data = {"name": "indexed", "path": str(prepared.train), "validation_path": str(prepared.validation)}
    return small_config(train__document_mask=True, train__steps=4, data=data, **overrides)


def test_every_layout_and_backend_masks_alike(tmp_path):
    """Middle stages are given the documents too; Transformer Engine's stand-in takes them as one row of sequences."""
    prepared = file_of_documents(tmp_path)
    dense = config_of(prepared, model__moe=None)
    one = run_on(dense, prepared)
    three = run_on(config_of(prepared, model__moe=None, parallel__pipeline=3), prepared)
    assert_same_run(one, three, tolerance=1e-9)
    shared = {"parallel__tensor": 2, "parallel__sequence_parallel": True, "train__recompute": "full"}
    assert_same_run(one, run_on(config_of(prepared, model__moe=None, **shared), prepared), tolerance=1e-9)
    for config in (dense, config_of(prepared, model__moe=None, **shared)):
        assert_same_run(one, run_on(replace(config, kernels="te"), prepared, engine=True), tolerance=1e-9)
    whole = run_on(replace(dense, train=replace(dense.train, document_mask=False)), prepared)
    assert abs(whole.rows[0]["loss"] / one.rows[0]["loss"] - 1) > 1e-5


def test_synthetic_data_has_no_documents():
    with pytest.raises(ConfigError, match="document_mask=true: data=synthetic has no documents; set"):
        small_config(train__document_mask=True)


def test_the_mask_is_in_the_plan(tmp_path):
    """One for all layers of a microbatch: 2 sequences of 8 tokens, with 8 places each, in float64."""
    masked = config_of(file_of_documents(tmp_path))
    plans = [
        make_plan(replace(masked, train=replace(masked.train, document_mask=on)))["stages"][0]["bytes"]["activations"]
        for on in (True, False)
    ]
    assert plans[0] - plans[1] == 2 * 8 * 8 * 8
