"""Token files, tokenizer, shuffling and microbatches: layout by hand, exact round trips, nothing repeated."""

import json
import random
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from megaasync.config.schema import HfData, IndexedData, PythonStdlibData
from megaasync.data import DataError
from megaasync.data.corpus import PythonStdlibCorpus, is_held_out
from megaasync.data.indexed_dataset import IndexedDataset, IndexedWriter, token_dtype
from megaasync.data.microbatches import TokenSequences, TrainingMicrobatches, ValidationMicrobatches
from megaasync.data.prepare import prepare_data
from megaasync.data.shuffle import permuted
from megaasync.data.synthetic import MarkovSource
from megaasync.data.tokenizer import Tokenizer, train_tokenizer

CPU = torch.device("cpu")


def write(prefix, documents, vocab_size=1000):
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_the_index_is_megatrons_layout_byte_for_byte(tmp_path):
    prefix = write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "d.idx").read_bytes() == expected
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)
    dataset = IndexedDataset(prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2, 3], [4], [5, 6]]


def test_a_file_written_by_megatrons_rules_is_read(tmp_path):
    """int32 tokens and two sequences in one document, as Megatron's own writer can make."""
    (tmp_path / "m.bin").write_bytes(struct.pack("<5i", 70000, 1, 2, 3, 4))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 2)
    index += struct.pack("<2i", 2, 3) + struct.pack("<2q", 0, 8) + struct.pack("<2q", 0, 2)
    (tmp_path / "m.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset[0].tolist() == [70000, 1]
    assert dataset[1].tolist() == [2, 3, 4]


@pytest.mark.parametrize("vocab_size", [65535, 65536, 65537, 70001])
def test_ids_at_the_edge_of_16_bits(tmp_path, vocab_size):
    write(tmp_path / "d", [[vocab_size - 1, 0]], vocab_size)
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [vocab_size - 1, 0]
    assert token_dtype(vocab_size) == (np.uint16 if vocab_size <= 65536 else np.int32)


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(DataError, match="1000"), IndexedWriter(tmp_path / "d", vocab_size=1000) as writer:
        writer.add_document([3, 1000])


def test_offsets_beyond_32_bits(tmp_path):
    """Five lengths that sum to more than 2^33 bytes; a sparse file stands in for the tokens."""
    lengths = np.full(5, 2**30, dtype="<i4")
    offsets = np.arange(5, dtype="<i8") * 2**31
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 5, 6)
    index += lengths.tobytes() + offsets.tobytes() + np.arange(6, dtype="<i8").tobytes()
    (tmp_path / "big.idx").write_bytes(index)
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(5 * 2**31)
        file.seek(2 * (5 * 2**30 - 1))
        file.write(struct.pack("<H", 77))
    assert IndexedDataset(tmp_path / "big")[4][-1] == 77


def test_a_million_tiny_documents_are_streamed(tmp_path):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with IndexedWriter(tmp_path / "d", vocab_size=1000) as writer:
        one = np.array([7])
        for _ in range(200_000):
            writer.add_document(one)
    assert len(IndexedDataset(tmp_path / "d")) == 200_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "d.bin").unlink(), "does not exist"),
        (lambda p: (p / "d.idx").write_bytes(b"nonsense" * 9), "not an MMIDIDX index"),
        (lambda p: (p / "d.bin").write_bytes(b"\0\0"), "its index speaks of"),
        (lambda p: (p / "d.idx").write_bytes((p / "d.idx").read_bytes()[:40]), "cut short"),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, message):
    write(tmp_path / "d", [[1, 2, 3], [4]])
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        prepare_data(IndexedData("indexed", str(tmp_path / "d"), None), vocab_size=10)
    assert str(tmp_path) in str(caught.value)


def raw_pair(folder, code, dtype, tokens, lengths, offsets):
    (folder / "r.bin").write_bytes(np.array(tokens, dtype=dtype).tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index += np.array(lengths, "<i4").tobytes() + np.array(offsets, "<i8").tobytes()
    (folder / "r.idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    return IndexedData("indexed", str(folder / "r"), None)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((4, "<i4", [1, -3, 2], [3], [0]), "holds token id -3"),
        ((8, "<u2", [1, 60, 2], [3], [0]), r"model.vocab_size=50: .* holds token id 60; set model.vocab_size=61"),
        ((7, "<f4", [1.0, 2.0], [2], [0]), "holds float32 numbers"),
        ((8, "<u2", [1, 2, 3], [-1, 4], [0, 2]), "contradict each other"),
        ((8, "<u2", [1, 2, 3], [1, 2], [0, 4]), "contradict each other"),
    ],
)
def test_bad_token_files_are_found_before_training(tmp_path, pair, message):
    with pytest.raises(DataError, match=message):
        prepare_data(raw_pair(tmp_path, *pair), vocab_size=50)


def test_an_empty_file_is_named(tmp_path):
    write(tmp_path / "d", [])
    with pytest.raises(DataError, match="holds no tokens"):
        IndexedDataset(tmp_path / "d")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    texts = [document.text for document, _ in zip(PythonStdlibCorpus().documents(), range(60))]
    path.write_bytes(train_tokenizer(texts, vocab_size=600))
    return Tokenizer(path)


def random_text(seed):
    draw = random.Random(seed)
    ranges = [(1, 127), (0xA0, 0xD7FF), (0x1F300, 0x1F640), (0x2580, 0x2584), (0xFFF0, 0xFFFD), (32, 33)]
    return "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(0, 60)))


SPECIAL = [
    "",
    " ",
    "\n",
    "  a  b ",
    "<s> </s> <unk> <0x41>",
    "\u2581x\u2581\u2581",
    "\0",
    "\r\n\t",
    "\ufeffBOM",
    "é e\u0301",
]


def test_round_trip_is_exact(tokenizer):
    for text in [*SPECIAL, *(random_text(seed) for seed in range(200))]:
        assert tokenizer.decode(tokenizer.encode(text)) == text, repr(text)


def test_batch_encoding_is_the_same_and_ends_each_document(tokenizer):
    texts = [*SPECIAL, "def f(x):\n    return x\n"]
    for text, ids in zip(texts, tokenizer.encode_documents(texts, threads=2), strict=True):
        assert ids == [*tokenizer.encode(text), tokenizer.eos_id]


def test_text_never_becomes_a_control_token(tokenizer):
    controls = {tokenizer._processor.bos_id(), tokenizer.eos_id, tokenizer._processor.unk_id()}
    for text in [*SPECIAL, "</s>", "<s>"]:
        assert not controls & set(tokenizer.encode(text))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "x.model").write_text("hello")
    with pytest.raises(DataError, match=r"x\.model: not a sentencepiece model"):
        Tokenizer(tmp_path / "x.model")
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer(tmp_path / "none.model")


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


def stdlib(cache):
    return PythonStdlibData("python_stdlib", str(cache), 0.05, 32_000_000)


def test_the_default_corpus_is_split_by_file_and_reused(tmp_path):
    lines = []
    first = prepare_data(stdlib(tmp_path), vocab_size=600, notify=lines.append)
    assert any("tokenizer" in line for line in lines)
    assert prepare_data(stdlib(tmp_path), vocab_size=600, notify=lines.append) == first
    assert sum("training a tokenizer" in line for line in lines) == 1
    keys = [d.key for d in PythonStdlibCorpus().documents() if d.text.strip()]
    held_out = [key for key in keys if is_held_out(key, fraction=0.05)]
    train, validation = IndexedDataset(first.train), IndexedDataset(first.validation)
    assert (len(train), len(validation)) == (len(keys) - len(held_out), len(held_out))
    tokenizer = Tokenizer(first.tokenizer)
    texts = {d.key: d.text for d in PythonStdlibCorpus().documents()}
    first_key = next(key for key in keys if key not in held_out)
    tokens = train[0].tolist()
    assert tokens[-1] == tokenizer.eos_id
    assert tokenizer.decode(tokens[:-1]) == texts[first_key]


def hf(cache, path, **changes):
    settings = {
        "name": "hf",
        "path": str(path),
        "split": "train",
        "text_field": "text",
        "tokenizer": None,
        "cache_dir": str(cache),
        "validation_fraction": 0.2,
        "tokenizer_bytes": 32_000_000,
        "on_bad_bytes": "stop",
    }
    return HfData(**{**settings, **changes})


TEXTS = [f"document {i}: " + " ".join(f"word{(i * j) % 97}" for j in range(40)) for i in range(50)]


def write_rows(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("\n\n".join(row["text"] or "" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_local_files_through_datasets(tmp_path, suffix):
    """Empty, blank and missing texts are left out; the rest comes back exactly, split by row."""
    rows = [{"text": ""}, *({"text": t} for t in TEXTS), {"text": "  \n "}, {"text": None}]
    path = write_rows(tmp_path / f"d{suffix}", rows)
    prepared = prepare_data(hf(tmp_path / "cache", path), vocab_size=450)
    tokenizer = Tokenizer(prepared.tokenizer)
    back = []
    for prefix in (prepared.train, prepared.validation):
        dataset = IndexedDataset(prefix)
        back += [tokenizer.decode(dataset[i].tolist()[:-1]) for i in range(len(dataset))]
        assert all(dataset[i][-1] == tokenizer.eos_id for i in range(len(dataset)))
    assert sorted(back) == sorted(TEXTS)


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: next(cache.glob("tokens-*/train.bin")).write_bytes(b"12"),
        lambda cache: next(cache.glob("tokens-*/validation.bin")).unlink(),
        lambda cache: next(cache.glob("tokens-*/counts.json")).write_text("{"),
        lambda cache: next(cache.glob("tokenizer-*.model")).write_bytes(b""),
    ],
)
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    cache = tmp_path / "cache"
    first = prepare_data(hf(cache, path), vocab_size=450)
    tokens = IndexedDataset(first.train).tokens.tolist()
    (cache / "tokens-0123.part").mkdir()  # left by a run that was killed
    damage(cache)
    second = prepare_data(hf(cache, path), vocab_size=450)
    assert second == first
    assert IndexedDataset(second.train).tokens.tolist() == tokens
    assert not list(cache.glob("*.part"))


def test_a_whole_cache_is_only_read(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    first = prepare_data(hf(tmp_path / "cache", path), vocab_size=450)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*") if "datasets" not in p.parts}
    assert prepare_data(hf(tmp_path / "cache", path), vocab_size=450) == first
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*") if "datasets" not in p.parts}


def test_several_files_by_a_glob_and_a_given_tokenizer(tmp_path, tokenizer):
    for name in "ab":
        write_rows(tmp_path / f"{name}.jsonl", [{"body": f"{name} {t}"} for t in TEXTS])
    model = tmp_path / "t.model"
    model.write_bytes(tokenizer._model_bytes)
    config = hf(tmp_path / "cache", tmp_path / "*.jsonl", text_field="body", tokenizer=str(model))
    prepared = prepare_data(config, vocab_size=600)
    assert prepared.tokenizer == str(model)
    assert len(IndexedDataset(prepared.train)) + len(IndexedDataset(prepared.validation)) == 100
    with pytest.raises(DataError, match=r"model\.vocab_size=500: the tokenizer .* has 600 pieces"):
        prepare_data(config, vocab_size=500)


def test_a_changed_file_is_tokenized_again(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    first = prepare_data(hf(tmp_path / "cache", path), vocab_size=450)
    write_rows(path, [{"text": t + " more"} for t in TEXTS])
    assert prepare_data(hf(tmp_path / "cache", path), vocab_size=450).train != first.train


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (b"", {}, "the file is empty"),
        (b'{"text": "caf\xe9"}\n', {}, "line 1: byte 0xe9 is not UTF-8"),
        (b'{"text": "ok"}\n{"text": "\xac"}\n', {}, "line 2: byte 0xac is not UTF-8"),
        (b'{"txt": "hello"}\n', {}, "data.text_field=text: .* has no such column; it has txt"),
        (b'{"text": "ok"}\n{"text": "hello"\n', {}, "line 2, column 17: is not JSON"),
        (b'{"text": ""}\n{"text": " "}\n', {}, "no training document has text"),
    ],
)
def test_bad_text_files_are_named(tmp_path, content, changes, message):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_data(hf(tmp_path / "cache", path, **changes), vocab_size=450)


def test_bad_bytes_can_be_replaced(tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes(b"\n\n".join([b"caf\xe9 au lait \xac\xf4", *(t.encode() for t in TEXTS)]))
    prepared = prepare_data(hf(tmp_path / "cache", path, on_bad_bytes="replace"), vocab_size=450)
    tokenizer = Tokenizer(prepared.tokenizer)
    text = "".join(
        tokenizer.decode(IndexedDataset(prefix).tokens.tolist()) for prefix in (prepared.train, prepared.validation)
    )
    assert "caf\ufffd au lait" in text


def test_four_processes_build_one_cache(tmp_path):
    code = (
        "import sys; from megaasync.config.schema import PythonStdlibData as D; "
        "from megaasync.data.prepare import prepare_data; "
        "prepare_data(D('python_stdlib', sys.argv[1], 0.05, 32_000_000), vocab_size=600, notify=print)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = "".join(process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * 4
    assert said.count("training a tokenizer") == said.count("data: tokenized") == 1
    assert [path.name.count(".") for path in tmp_path.glob("tokens-*")] == [0]
    IndexedDataset(prepare_data(stdlib(tmp_path), vocab_size=600).train)
