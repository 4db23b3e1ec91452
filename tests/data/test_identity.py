"""A name, a size and a time stamp are not the content; what is held out is decided by what a document says."""

import gzip
import json
import os

import pytest

from megaasync.config import ConfigError
from megaasync.config.schema import IndexedData
from megaasync.data import DataError
from megaasync.data.identity import check_identity, identify_tokens, record_of, sampled_hash, samples_of, write_manifest
from megaasync.data.indexed_dataset import IndexedDataset, IndexedWriter
from megaasync.data.prepare import prepare_data
from megaasync.data.text_files import expand, texts_of
from megaasync.data.tokenizer import Tokenizer, _sentences, sample_texts
from tests.data.test_data import TEXTS, hf, stdlib, write_rows


def write_tokens(prefix, tokens):
    with IndexedWriter(prefix, vocab_size=100) as writer:
        for document in tokens:
            writer.add_document(document)


def keep_time(path, change):
    """Change a file and give it its old modification time."""
    status = path.stat()
    change(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_of_the_same_name_size_and_time_is_another(tmp_path):
    """Sixty-four blocks are compared at every start, even when size and time are the same."""
    path = tmp_path / "f"
    path.write_bytes(os.urandom(9_000_000))
    said = []
    before = record_of(path, None, notify=said.append)
    assert record_of(path, before, notify=said.append) is before
    keep_time(path, lambda p: p.write_bytes(os.urandom(9_000_000)))
    after = record_of(path, before, notify=said.append)
    assert after.sha256 != before.sha256 and (after.size, after.mtime_ns) == (before.size, before.mtime_ns)


def test_the_whole_is_hashed_when_the_time_differs(tmp_path):
    """One byte between the samples: only the full hash sees it, and a new time asks for it."""
    path = tmp_path / "f"
    path.write_bytes(bytes(20_000_000))
    before = record_of(path, None, notify=print)
    with path.open("r+b") as file:
        file.seek(100_000)  # between the first block of 64 KiB and the second
        file.write(b"x")
    os.utime(path, ns=(1, before.mtime_ns + 1))
    after = record_of(path, before, notify=print)
    assert after.samples == before.samples == sampled_hash(path) and after.sha256 != before.sha256


def test_token_files_that_are_not_their_manifests_are_refused(tmp_path):
    prefix = tmp_path / "t"
    write_tokens(prefix, [[1, 2, 3], [4, 5]])
    write_manifest(prefix)
    first = identify_tokens(prefix, memory=tmp_path / "m", notify=print)
    os.utime(tmp_path / "t.bin", ns=(1, 1))  # a copy has the same content
    assert identify_tokens(prefix, memory=tmp_path / "m", notify=print) == first
    (tmp_path / "t.bin").write_bytes((tmp_path / "t.bin").read_bytes()[::-1])
    with pytest.raises(DataError, match=r"t\.bin: is not the file that t\.manifest\.json was written for"):
        identify_tokens(prefix, memory=tmp_path / "m", notify=print)
    write_tokens(prefix, [[1, 2, 3], [4, 6]])
    write_manifest(prefix)
    assert identify_tokens(prefix, memory=tmp_path / "m", notify=print) != first


def test_token_files_without_a_manifest_are_hashed_once_and_again_when_they_change(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAASYNC_CACHE", str(tmp_path / "cache"))
    prefix = tmp_path / "made.by.megatron"
    write_tokens(prefix, [[1, 2, 3], [4, 5]])
    data = IndexedData("indexed", str(prefix), None)
    first = prepare_data(data, vocab_size=100).identity
    assert prepare_data(data, vocab_size=100).identity == first and first["validation"] is None
    assert len(list((tmp_path / "cache/hashes").iterdir())) == 2
    assert prepare_data(data, vocab_size=100, identify=False).identity == {}
    quick = samples_of(str(prefix))
    keep_time(tmp_path / "made.by.megatron.bin", lambda p: p.write_bytes(p.read_bytes()[2:] + p.read_bytes()[:2]))
    assert prepare_data(data, vocab_size=100).identity["train"] != first["train"]
    assert samples_of(str(prefix)) != quick


def test_a_cached_token_file_overwritten_by_one_of_the_same_size_is_made_again(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    first = prepare_data(hf(tmp_path / "cache", path), vocab_size=450)
    tokens = IndexedDataset(first.train).tokens.tolist()
    binary = next((tmp_path / "cache").glob("tokens-*/train.bin"))
    binary.write_bytes(binary.read_bytes()[::-1])
    second = prepare_data(hf(tmp_path / "cache", path), vocab_size=450)
    assert second == first and IndexedDataset(second.train).tokens.tolist() == tokens


def test_the_cache_is_keyed_by_content(tmp_path):
    """The same size and time with other texts is another corpus; another name and time with the same is the same."""
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    first = prepare_data(hf(tmp_path / "cache", path), vocab_size=450)
    moved = path.rename(tmp_path / "moved.jsonl")
    os.utime(moved, ns=(5, 5))
    assert prepare_data(hf(tmp_path / "cache", moved), vocab_size=450) == first
    swapped = [{"text": t.replace("document", "tnemucod")} for t in TEXTS]
    keep_time(moved, lambda p: write_rows(p, swapped))
    second = prepare_data(hf(tmp_path / "cache", moved), vocab_size=450)
    assert second.identity["train"] != first.identity["train"]
    text = Tokenizer(second.tokenizer).decode(IndexedDataset(second.train).tokens.tolist())
    assert "tnemucod" in text and "document" not in text


def held_out_of(prepared):
    tokenizer, validation = Tokenizer(prepared.tokenizer), IndexedDataset(prepared.validation)
    return {tokenizer.decode(validation[i].tolist()[:-1]) for i in range(len(validation))}


def test_a_file_more_moves_no_document_between_training_and_validation(tmp_path):
    write_rows(tmp_path / "b.jsonl", [{"text": t} for t in TEXTS])
    before = held_out_of(prepare_data(hf(tmp_path / "cache", tmp_path / "*.jsonl"), vocab_size=450))
    write_rows(tmp_path / "a.jsonl", [{"text": f"another {t}"} for t in TEXTS[:17]])
    after = held_out_of(prepare_data(hf(tmp_path / "cache", tmp_path / "*.jsonl"), vocab_size=450))
    assert before and {text for text in after if not text.startswith("another")} == before


def test_identities_are_compared_by_name():
    then = {"tokenizer": "a" * 64, "train": "b" * 64, "validation": None}
    check_identity(then, dict(then), where="checkpoint c", override=False, is_known=False)
    with pytest.raises(ConfigError, match=r"the tokenizer is not that of checkpoint c \(SHA-256 aaaaaaaaaaaa, now x\)"):
        check_identity(then, {**then, "tokenizer": "x"}, where="checkpoint c", override=False, is_known=False)
    with pytest.raises(ConfigError, match="the validation tokens are not those of checkpoint c"):
        check_identity(then, {**then, "validation": "x"}, where="checkpoint c", override=False, is_known=False)
    check_identity(then, {**then, "validation": "x"}, where="checkpoint c", override=True, is_known=False)
    check_identity(None, then, where="checkpoint c", override=False, is_known=True)
    with pytest.raises(ConfigError, match="before content hashes were kept"):
        check_identity(None, then, where="checkpoint c", override=False, is_known=False)


def test_a_tokenizer_is_trained_on_all_files_and_documents(tmp_path):
    """The second language in the second file is sampled too, and one long document does not fill the sample."""
    first = ["the quick brown fox jumps over the lazy dog " * 40] * 30
    second = ["съешь же ещё этих мягких французских булок " * 40] * 30
    texts = [f"{i} {t}" for i, t in enumerate(first)] + [f"{i} {t}" for i, t in enumerate(second)]
    sample = sample_texts(texts, max_bytes=40_000)
    assert 20_000 < sample.used_bytes <= 40_000 < sample.total_bytes and sample.documents == 60
    cyrillic = sum("булок" in unit for unit in sample.units)
    assert 0.25 < cyrillic / len(sample.units) < 0.75
    whole = sample_texts(texts, max_bytes=10**9)
    assert list(whole.units) == texts and whole.used_bytes == whole.total_bytes
    again = sample_texts(list(reversed(texts)), max_bytes=40_000)
    assert sorted(again.units) == sorted(sample.units), "the order of files changed the sample"
    lines = "".join(f"line {i} of one long document\n" for i in range(20_000))
    assert len(sample_texts([lines, *texts], max_bytes=40_000).units) > 2


def test_a_document_of_one_long_line_is_seen_whole():
    """Nothing of it is cut away before training: what is said to be used is what the trainer gets."""
    texts = [f"{i} " + "latin letters " * 80 + "кириллица " * 6000 for i in range(8)]
    sample = sample_texts(texts, max_bytes=10**9)
    assert "".join(sample.units) == "".join(texts)
    assert "".join(_sentences(sample.units)) == "".join(texts)
    assert max(len(sentence.encode()) for sentence in _sentences(sample.units)) <= 4192
    assert len(sample_texts(texts, max_bytes=200_000).units) > 3, "a unit is as large as a document"


def test_a_folder_is_read_with_the_folders_that_are_linked_into_it(tmp_path):
    (tmp_path / "corpus/own").mkdir(parents=True)
    (tmp_path / "far").mkdir()
    for name in ("corpus/own/a.jsonl", "far/b.jsonl"):
        (tmp_path / name).write_text(ROWS)
    (tmp_path / "corpus/linked").symlink_to(tmp_path / "far")
    (tmp_path / "corpus/own/loop").symlink_to(tmp_path / "corpus")
    assert [path.name for path in expand(str(tmp_path / "corpus"))] == ["b.jsonl", "a.jsonl"]


@pytest.mark.slow("data")
def test_how_much_the_tokenizer_saw_is_told(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    said = []
    prepare_data(hf(tmp_path / "cache", path, tokenizer_bytes=3000), vocab_size=450, notify=said.append)
    line = next(line for line in said if "training a tokenizer" in line)
    assert "a sample spread evenly over the" in line and "data.tokenizer_bytes" in line
    prepare_data(stdlib(tmp_path / "other"), vocab_size=600, notify=said.append)
    assert "all of the" in next(line for line in said if "600 pieces" in line)


def test_unknown_pieces_are_told_and_much_of_them_warned_of(tmp_path, monkeypatch):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "t"), vocab_size=60, minloglevel=2,
        model_type="bpe", hard_vocab_limit=False,
    )  # fmt: skip
    path = write_rows(tmp_path / "d.jsonl", [{"text": f"{t} ему ещё"} for t in TEXTS])
    said = []
    prepare_data(hf(tmp_path / "c", path, tokenizer=str(tmp_path / "t.model")), vocab_size=450, notify=said.append)
    line = next(line for line in said if "unknown" in line)
    assert "WARNING" in line and "data.tokenizer" in line
    counts = json.loads(next((tmp_path / "c").glob("tokens-*/counts.json")).read_text())
    assert counts["unknown"] >= 50 and f"{counts['unknown']} of {counts['tokens']} tokens" in line


ROWS = "".join(json.dumps({"text": f"row {i}", "id": i}) + "\n" for i in range(5))


@pytest.mark.parametrize(
    ("content", "field", "texts"),
    [
        ('{"text": "a"}\n{"text": "b", "late": 1}\n', "text", ["a", "b"]),
        ('{"text": "first", "text": "second"}\n', "text", ["second"]),
        ('{"text": null, "at": null}\n{"text": "2024-01-02", "at": "2024-01-02"}\n', "text", ["", "2024-01-02"]),
        ('\ufeff{"text": "marked"}\n\n\n{"text": "x"}\r\n', "text", ["marked", "x"]),
        ('{"text": "cut \\ud83d here"}\n', "text", ["cut \ufffd here"]),
    ],
)
def test_rows_are_read_whatever_the_other_columns_hold(tmp_path, content, field, texts):
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    assert list(texts_of(path, field=field, replace_bad_bytes=False)) == texts


def test_compressed_files_lists_and_spark_folders(tmp_path):
    import pyarrow
    from pyarrow import parquet

    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(ROWS)
    (tmp_path / "b.json").write_text("[\n" + ",\n".join(ROWS.splitlines()) + "\n]")
    (tmp_path / "t.parquet").mkdir()
    table = pyarrow.table({"text": [f"row {i}" for i in range(5)], "id": [{"x": i} for i in range(5)]})
    parquet.write_table(table, tmp_path / "t.parquet/part-0.parquet")
    (tmp_path / "t.parquet/_SUCCESS").write_text("")
    for pattern in ("a.jsonl.gz", "b.json", "t.parquet", "*.parquet"):
        (path,) = expand(str(tmp_path / pattern))
        found = list(texts_of(path, field="text", replace_bad_bytes=False))
        assert found == [f"row {i}" for i in range(5)], pattern


def test_paths_mean_what_they_say(tmp_path, monkeypatch):
    """An existing path wins over its reading as a glob, ** is recursive, ~ is home."""
    for name in ("v[2]/a.jsonl", "deep/x/y/b.jsonl", "deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand(f"{tmp_path}/v[2]/a.jsonl") == [tmp_path / "v[2]/a.jsonl"]
    assert expand(f"{tmp_path}/v[2]") == [tmp_path / "v[2]/a.jsonl"]
    assert len(expand(f"{tmp_path}/deep/**/*.jsonl")) == 2
    assert expand("~/deep/c.jsonl") == [tmp_path / "deep/c.jsonl"]
    assert expand(str(tmp_path / "no.jsonl")) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\x1f\x8b\x08rest", r"is compressed \(gz, by its first bytes\); name it a\.jsonl\.gz"),
        ("a.jsonl.gz", b'{"text": "plain"}\n', "is not gz-compressed"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("a.txt", "text".encode("utf-16"), "is UTF-16"),
        ("a.parquet", b"nothing", "no parquet file"),
        ("a.csv", b"text\n", "unknown kind of file"),
        ("a.jsonl", b'{"text": "x"}\nnot json\n', r"a\.jsonl, line 2, column 1: is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x"}\n', r"a\.jsonl, line 2 has no such column; it has body"),
        ("a.jsonl", b'{"text": 7}\n', r"line 1 holds int, not text"),
        ("a.jsonl", b"[1]\n", r"line 1: holds list, not an object"),
        ("a.jsonl.gz", gzip.compress(ROWS.encode(), mtime=0)[:-12], "cannot be unpacked"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_data(hf(tmp_path / "cache", tmp_path / name), vocab_size=450)


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(ROWS)
    (tmp_path / "b.jsonl").symlink_to("missing")
    with pytest.raises(DataError, match=r"b\.jsonl is a link to missing, which does not exist"):
        prepare_data(hf(tmp_path / "cache", tmp_path / "*.jsonl"), vocab_size=450)


def test_without_locks_builders_do_not_disturb_each_other(tmp_path, monkeypatch):
    """A file system without flock: the corpus is prepared all the same, under own names and by one rename."""
    import errno
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tokens-0123.77-ab.part").mkdir()  # of another builder that is at work
    first = prepare_data(hf(cache, path), vocab_size=450)
    assert prepare_data(hf(cache, path), vocab_size=450) == first
    assert (cache / "tokens-0123.77-ab.part").exists()


def test_a_cache_that_cannot_be_locked_by_its_file_is_named(tmp_path):
    """As a lock of another user, which may not be opened."""
    path = write_rows(tmp_path / "d.jsonl", [{"text": t} for t in TEXTS])
    (tmp_path / "cache/lock").mkdir(parents=True)
    with pytest.raises(DataError, match=r"data\.cache_dir=.*cache: lock cannot be opened .*a folder of your own"):
        prepare_data(hf(tmp_path / "cache", path), vocab_size=450)
