"""Token files in Megatron's MMIDIDX layout: PATH.bin holds the tokens, PATH.idx the document lengths.

Layout of the index, little endian: 9 bytes ``MMIDIDX\\0\\0``, u64 version 1, u8 dtype code, u64 number of sequences N,
u64 length D of the document index, then N i32 lengths, N i64 byte offsets, D i64 document boundaries (Megatron-LM,
megatron/core/datasets/indexed_dataset.py; the layout only).
"""

import struct
from array import array
from pathlib import Path
from types import TracebackType

import numpy as np

from megaasync.data import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
CODE_OF_DTYPE = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
_PART, _PARTS_CHECKED = 1 << 20, 64  # tokens, parts: what check_ids reads of a large file
DTYPE_OF_CODE = {code: np.dtype(name) for name, code in CODE_OF_DTYPE.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """Narrowest dtype of the layout that holds the ids 0 .. vocab_size - 1."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


class IndexedWriter:
    """Writes documents one after the other; a context manager that completes the index when left without an error."""

    def __init__(self, prefix: Path, *, vocab_size: int) -> None:
        self._prefix = prefix
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._lengths = array("i")
        self._file = open(prefix.with_name(prefix.name + ".bin"), "wb")  # noqa: SIM115 - closed on leaving the context

    def add_document(self, tokens: list[int] | np.ndarray) -> None:
        """Append one document, its end-of-document token included.

        Raises:
            DataError: an id lies outside the vocabulary.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise DataError(f"{self._prefix}: token id {ids.max()} lies outside the vocabulary of {self._vocab_size}")
        self._file.write(ids.astype(self._dtype).tobytes())
        self._lengths.append(ids.size)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        # 64-bit sums: a 32-bit sum of byte offsets wraps beyond 2 GiB.
        offsets = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        offsets *= self._dtype.itemsize
        with open(self._prefix.with_name(self._prefix.name + ".idx"), "wb") as file:
            file.write(MAGIC)
            file.write(HEADER.pack(1, CODE_OF_DTYPE[self._dtype.name], len(lengths), len(lengths) + 1))
            file.write(lengths.astype("<i4").tobytes())
            file.write(offsets.astype("<i8").tobytes())
            file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


class IndexedDataset:
    """A memory-mapped pair of token files.

    Attributes:
        tokens: all tokens, [num_tokens], in file order.
        lengths: tokens of each sequence, [num_sequences] int32.
        document_ends: where each document ends in `tokens`, [num_documents] int64; one is of one sequence or more.
    """

    def __init__(self, prefix: str | Path) -> None:
        self._index_path, self._bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (self._index_path, self._bin_path):
            if not path.is_file():
                raise DataError(f"data.path={prefix}: {path} does not exist; give the prefix of a .bin and .idx pair")
        raw = self._index_path.read_bytes()
        start = len(MAGIC) + HEADER.size
        if len(raw) < start or not raw.startswith(MAGIC):
            raise DataError(f"{self._index_path}: not an MMIDIDX index; make it with tools/preprocess_data.py")
        version, code, count, boundaries = HEADER.unpack_from(raw, len(MAGIC))
        if version != 1 or code not in DTYPE_OF_CODE:
            raise DataError(f"{self._index_path}: MMIDIDX version {version}, dtype code {code} is not supported")
        if len(raw) < start + 12 * count + 8 * boundaries:
            raise DataError(f"{self._index_path}: cut short ({len(raw)} bytes); write it again")
        dtype = DTYPE_OF_CODE[code]
        if dtype.kind not in "iu":
            raise DataError(f"{self._index_path}: holds {dtype} numbers; tokens must be whole numbers")
        self.lengths = np.frombuffer(raw, "<i4", count, start)
        self._offsets = np.frombuffer(raw, "<i8", count, start + 4 * count)
        firsts = np.frombuffer(raw, "<i8", boundaries, start + 12 * count)  # sequences before each document, and all
        ends = np.cumsum(self.lengths, dtype=np.int64) * dtype.itemsize
        starts = ends - self.lengths.astype(np.int64) * dtype.itemsize
        if (self.lengths < 0).any() or not np.array_equal(starts, self._offsets):
            raise DataError(f"{self._index_path}: lengths and offsets contradict each other; write it again")
        if boundaries and ((np.diff(firsts) < 0).any() or firsts[0] != 0 or firsts[-1] != count):
            raise DataError(f"{self._index_path}: its documents are not those of its {count} sequences; write it again")
        self.document_ends = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[firsts[1:]]
        expected = int(self.lengths.sum(dtype=np.int64)) * dtype.itemsize
        size = self._bin_path.stat().st_size
        if size != expected:
            raise DataError(f"{self._bin_path}: has {size} bytes, but its index speaks of {expected}; write both again")
        if size == 0:
            raise DataError(f"{self._bin_path}: holds no tokens; give a file with text in it")
        self.tokens = np.memmap(self._bin_path, dtype=dtype, mode="r")

    def check_ids(self, vocab_size: int) -> None:
        """Look at the tokens, or at evenly spread parts of a large file.

        Raises:
            DataError: an id lies outside the vocabulary.
        """
        starts = range(0, len(self.tokens), max(len(self.tokens) // _PARTS_CHECKED, _PART))
        for start in starts:
            part = self.tokens[start : start + _PART]
            if part.min() < 0 or part.max() >= vocab_size:
                worst = part.min() if part.min() < 0 else part.max()
                raise DataError(
                    f"model.vocab_size={vocab_size}: {self._bin_path} holds token id {worst}; set model.vocab_size="
                    f"{part.max() + 1} or more, or use files of this tokenizer"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of one sequence, [length]."""
        start = int(self._offsets[index]) // self.tokens.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[index])]
