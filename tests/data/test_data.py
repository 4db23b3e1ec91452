"""Token files, tokenizer, shuffling and microbatches: layout by hand, exact round trips, nothing repeated."""

import json
import random
import subprocess
import sys

import pytest
import torch

from megaasync.config.schema import HfData, PythonStdlibData
from megaasync.data import DataError
from megaasync.data.corpus import PythonStdlibCorpus, is_held_out
from megaasync.data.indexed_dataset import IndexedDataset
from megaasync.data.prepare import prepare_data
from megaasync.data.tokenizer import Tokenizer, train_tokenizer

CPU = torch.device("cpu")


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


@pytest.mark.slow("data")
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
