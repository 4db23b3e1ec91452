"""A sentencepiece tokenizer with byte fallback: any text comes back exactly, and text never becomes a control token."""

import hashlib
import heapq
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from megaasync.data import DataError

# sentencepiece writes a space as this character, so the character itself must go through byte pieces.
_SPACE_MARK = "\u2581"
_LONGEST_LINE = 4192  # bytes; sentencepiece's own limit on a training sentence
_UNIT = 16_384  # letters of text that are sampled together, so that one long document does not fill the sample


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: number of pieces.
        eos_id: id that ends a document.
        unknown_id: id of what the model has no piece for, and no bytes either.
        fingerprint: hash of the model, for cache keys.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._model_bytes = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"data.tokenizer={path}: cannot be read ({error.strerror}); give a .model file") from None
        self._processor = import_module("sentencepiece").SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._model_bytes)
        except RuntimeError:
            raise DataError(f"data.tokenizer={path}: not a sentencepiece model") from None
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        self.unknown_id = self._processor.unk_id()
        if self.eos_id < 0:
            raise DataError(f"data.tokenizer={path}: has no end-of-sequence token; train one with eos_id set")
        self.fingerprint = hashlib.sha256(self._model_bytes).hexdigest()
        mark_bytes = [f"<0x{byte:02X}>" for byte in _SPACE_MARK.encode()]
        self._mark_ids = [self._processor.piece_to_id(piece) for piece in mark_bytes]

    def encode_documents(self, texts: list[str], *, threads: int) -> list[list[int]]:
        """Ids of each text, each ending in `eos_id`."""
        plain = [i for i, text in enumerate(texts) if _SPACE_MARK not in text]
        encoded = self._processor.encode([texts[i] for i in plain], num_threads=threads)
        ids: list[list[int]] = [[] for _ in texts]
        for i, tokens in zip(plain, encoded, strict=True):
            ids[i] = tokens
        for i in set(range(len(texts))) - set(plain):
            ids[i] = self.encode(texts[i])
        return [[*tokens, self.eos_id] for tokens in ids]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-document token."""
        ids: list[int] = []
        for number, part in enumerate(text.split(_SPACE_MARK)):
            if number:
                ids += self._mark_ids
            ids += self._processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of some ids; control tokens give nothing."""
        return self._processor.decode(ids)


@dataclass(frozen=True, slots=True)
class TextSample:
    """Text that a tokenizer is trained on.

    Attributes:
        units: pieces of documents, in the order of the corpus.
        used_bytes: of them.
        total_bytes: of the whole corpus.
        documents: how many the corpus has.
    """

    units: Sequence[str]
    used_bytes: int
    total_bytes: int
    documents: int


def _units(text: str) -> Iterator[str]:
    """Whole lines of a text, about `_UNIT` letters at a time."""
    lines: list[str] = []
    length = 0
    pieces = (
        line[start : start + _UNIT]
        for line in text.splitlines(keepends=True)
        for start in range(0, len(line), _UNIT)  # a document may be one line
    )
    for line in pieces:
        lines.append(line)
        length += len(line)
        if length >= _UNIT:
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def sample_texts(texts: Iterable[str], *, max_bytes: int) -> TextSample:
    """An even sample of a corpus, all of it if it is small enough; one pass, memory for the sample only.

    Every unit of text has the same chance, by a hash of what it says: neither the order of files nor what lies beside
    it changes whether it is taken.

    Args:
        texts: documents.
        max_bytes: largest sample, in bytes of UTF-8.
    """
    kept: list[tuple[int, int, str, int]] = []  # the unit with the largest hash first
    used = total = documents = number = 0
    for text in texts:
        documents += 1
        for unit in _units(text):
            content = unit.encode(errors="replace")
            draw = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
            heapq.heappush(kept, (-draw, number, unit, len(content)))
            number += 1
            used += len(content)
            total += len(content)
            while used > max_bytes and len(kept) > 1:
                used -= heapq.heappop(kept)[3]
    units = [unit for _, unit in sorted((row[1], row[2]) for row in kept)]
    return TextSample(units, used, total, documents)


def _sentences(units: Iterable[str]) -> Iterator[str]:
    """Lines of text, newline included; long ones in pieces that sentencepiece takes."""
    longest = _LONGEST_LINE // 4  # letters, of at most four bytes
    for unit in units:
        for line in unit.splitlines(keepends=True):
            whole = line.replace("\0", "")
            for start in range(0, len(whole), longest):
                yield whole[start : start + longest]


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> bytes:
    """Train a BPE model whose round trip is exact: byte fallback, no normalisation, no dummy prefix.

    Args:
        texts: documents, or units of a `TextSample`; all are used.
        vocab_size: pieces of the model; fewer if the text does not give that many.

    Returns:
        The serialized model.

    Raises:
        DataError: there is no text, or the vocabulary is too small for its letters.
    """
    sentences = list(_sentences(texts))
    if not sentences:
        raise DataError("no text to train a tokenizer on: every document is empty; check data.path and data.text_field")
    model = io.BytesIO()
    try:
        import_module("sentencepiece").SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            split_digits=True,
            num_threads=1,  # more threads change nothing in the result but make timing vary
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"model.vocab_size={vocab_size}: no tokenizer can be trained with it on this text ({error}); "
            "set a larger model.vocab_size"
        ) from None
    return model.getvalue()
