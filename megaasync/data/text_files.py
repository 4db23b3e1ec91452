"""Texts out of local files: .txt, .jsonl, .json and parquet, of which only the column with the text is read.

Types of other columns do not matter, nor do keys that come late. What cannot be read is refused with file and line.
"""

import bz2
import glob
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from megaasync.config.read import listed
from megaasync.data import DataError

_OPENERS: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}  # for reading
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_WIDE = (b"\xff\xfe", b"\xfe\xff")  # byte order marks of UTF-16 and UTF-32
_UTF8_MARK = b"\xef\xbb\xbf"
_LFS = b"version https://git-lfs"
KINDS = (".txt", ".text", ".jsonl", ".json", ".parquet")


def kind_of(path: Path) -> str | None:
    """Which of KINDS a file is, by its name without a compression suffix; None for another."""
    inner = path.with_suffix("") if path.suffix in _OPENERS else path
    return inner.suffix if inner.suffix in KINDS else None


def expand(pattern: str) -> list[Path]:
    """The files that a path means: a file, all files of known kinds below a folder, or a glob (`**` is recursive).

    An existing path wins over its reading as a glob. Empty if nothing is there.

    Raises:
        DataError: a link leads nowhere, or a folder holds no text.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        return _files_below(path)
    if path.exists() or path.is_symlink():
        return [_checked(path)]
    found: list[Path] = []
    for name in sorted(glob.glob(str(path), recursive=True)):
        one = Path(name)
        if not one.is_dir():
            found.append(_checked(one))
        elif kind_of(one) is not None:  # a table that Spark wrote as a folder
            found += _files_below(one)
    return found


def _files_below(folder: Path) -> list[Path]:
    hidden = ("_", ".")  # as Spark's _SUCCESS
    found, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith(hidden))
        if real not in seen:
            files = (Path(place) / name for name in names if not name.startswith(hidden))
            found += [_checked(path) for path in files if kind_of(path) is not None]
        seen.add(real)
    found.sort()
    if not found:
        raise DataError(f"data.path={folder}: no file in this folder ends in {listed(KINDS)}; give another path")
    return found


def _checked(path: Path) -> Path:
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"data.path: {path} is a link to {path.readlink()}, which does not exist; remove the link or bring its "
            "target back"
        )
    return path


def check_file(path: Path) -> None:
    """Look at the first bytes of a file.

    Raises:
        DataError: it is not what its name says.
    """
    if kind_of(path) is None:
        raise DataError(f"data.path={path}: unknown kind of file; use {listed(KINDS)}, or these with .gz, .bz2 or .xz")
    with path.open("rb") as file:
        start = file.read(32)
    if start.startswith(_LFS):
        raise DataError(f"{path}: is a Git LFS pointer and not the data; run `git lfs pull` in its repository")
    packed = next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), None)
    if packed is not None and path.suffix != packed:
        known = packed in _OPENERS
        remedy = f"name it {path.name}{packed}" if known else "unpack it first"
        raise DataError(f"{path}: is compressed ({packed[1:]}, by its first bytes); {remedy}")
    if packed is None and path.suffix in _OPENERS and start:
        raise DataError(f"{path}: is not {path.suffix[1:]}-compressed, whatever its name says; rename it")
    if start.startswith(_WIDE) and kind_of(path) != ".parquet":
        raise DataError(f"{path}: is UTF-16, not UTF-8; convert it (iconv -f utf-16 -t utf-8)")
    if kind_of(path) == ".parquet" and start[:4] != b"PAR1" and start:
        raise DataError(f"{path}: is no parquet file (it does not begin with PAR1); write it again")


def texts_of(path: Path, *, field: str, replace_bad_bytes: bool) -> Iterator[str]:
    """The texts of one file, in order; an empty text where a row has null.

    Args:
        path: of a kind in KINDS.
        field: column with the text; a .txt file has paragraphs instead, with blank lines between.
        replace_bad_bytes: bytes that are not UTF-8 become U+FFFD; otherwise they are an error.

    Raises:
        DataError: names file and line.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _parquet_texts(path, field)
        return
    try:
        with _OPENERS.get(path.suffix, Path.open)(path, "rb") as file:
            lines = _lines(file, path, replace_bad_bytes=replace_bad_bytes)
            if kind in (".txt", ".text"):
                yield from _paragraphs(lines)
            else:
                yield from _json_texts(lines, path, field)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}); it is damaged or cut short, get it again") from None


def _lines(file: IO[bytes], path: Path, *, replace_bad_bytes: bool) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line, its end included."""
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(_UTF8_MARK) if number == 1 else line
        try:
            yield number, content.decode(errors="replace" if replace_bad_bytes else "strict")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number}: byte 0x{content[error.start]:02x} is not UTF-8; convert the file "
                "(iconv -f latin1 -t utf-8) or set data.on_bad_bytes=replace"
            ) from None


def _paragraphs(lines: Iterator[tuple[int, str]]) -> Iterator[str]:
    paragraph: list[str] = []
    for _, line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).rstrip("\n")
            paragraph = []
    if paragraph:
        yield "".join(paragraph).rstrip("\n")


def _json_texts(lines: Iterator[tuple[int, str]], path: Path, field: str) -> Iterator[str]:
    """Texts of a file with one object a line, or of one list of objects."""
    for number, line in lines:
        if not line.strip():
            continue
        if line.lstrip().startswith("[") and kind_of(path) == ".json":
            yield from _list_texts(line + "".join(rest for _, rest in lines), path, field)
            return
        yield _text_of_row(_parsed(line.rstrip(), path, number), f"{path}, line {number}", field)


def _parsed(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {first_line + error.lineno - 1}, column {error.colno}: is not JSON ({error.msg}); check the "
            "file, it must hold one object a line"
        ) from None
    except RecursionError:
        raise DataError(f"{path}, line {first_line}: is nested too deeply to be read; check the file") from None


def _list_texts(text: str, path: Path, field: str) -> Iterator[str]:
    for number, row in enumerate(_parsed(text, path, 1)):
        yield _text_of_row(row, f"{path}, row {number} of its list", field)


def _text_of_row(row: Any, where: str, field: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds {type(row).__name__}, not an object with a field {field}; check the file")
    if field not in row:
        raise DataError(f"data.text_field={field}: {where} has no such column; it has {', '.join(row)}")
    return _as_text(row[field], where, field)


def _as_text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str | None):
        raise DataError(
            f"data.text_field={field}: {where} holds {type(value).__name__}, not text; name a column with text"
        )
    try:
        (value or "").encode()
    except UnicodeEncodeError:  # half of a pair, as "\\ud83d" of an emoji that was cut: no text can hold it
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value or ""


def _parquet_texts(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"data.text_field={field}: {path} has no such column; it has {names}")
            number = 0
            for batch in file.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield _as_text(value, f"row {number} of {path}", field)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]}); it is damaged, get it again") from None
