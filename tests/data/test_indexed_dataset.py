"""Token files in Megatron's layout: byte for byte, damaged, large and empty."""

import struct

import numpy as np
import pytest

from megaasync.config.schema import IndexedData
from megaasync.data import DataError
from megaasync.data.indexed_dataset import IndexedDataset, IndexedWriter, token_dtype
from megaasync.data.prepare import prepare_data


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
