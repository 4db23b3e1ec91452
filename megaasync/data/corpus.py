"""Documents from somewhere: the Python standard library's source, or whatever the `datasets` library reads."""

import glob
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megaasync.config.schema import HfData
from megaasync.data import DataError

_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
_BUILDERS = {".txt": "text", ".text": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `key` is stable over runs and decides whether it is held out."""

    key: str
    text: str


class Corpus(Protocol):
    """A set of documents with a fingerprint of its content."""

    def fingerprint(self) -> str:
        """Changes when the documents change."""

    def documents(self) -> Iterator[Document]:
        """All documents, in the same order every time."""


def is_held_out(key: str, *, fraction: float) -> bool:
    """Whether a document belongs to validation: by a hash of its key, so it never changes sides."""
    draw = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") / 2**64
    return draw < fraction


class PythonStdlibCorpus:
    """Every .py file of this Python's standard library, tests left out; a file is a document."""

    def __init__(self) -> None:
        self._root = Path(sysconfig.get_paths()["stdlib"])
        self._files = sorted(
            path for path in self._root.rglob("*.py") if not _NOT_CORPUS & set(path.relative_to(self._root).parts)
        )
        if not self._files:
            raise DataError(
                f"data=python_stdlib: no source files under {self._root}; this Python ships without its source, "
                "use data=hf data.path=FILE"
            )

    def fingerprint(self) -> str:
        """Hash of names and contents."""
        digest = hashlib.sha256()
        for path in self._files:
            digest.update(str(path.relative_to(self._root)).encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Files in order of name; the few that are not UTF-8 are left out."""
        for path in self._files:
            try:
                yield Document(str(path.relative_to(self._root)), path.read_bytes().decode())
            except UnicodeDecodeError:
                continue


def check_utf8(path: Path) -> None:
    """Read a text file through once.

    Raises:
        DataError: names file, line and byte.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: byte 0x{line[error.start]:02x} is not UTF-8; convert the file "
                    "(iconv -f latin1 -t utf-8) or set data.on_bad_bytes=replace"
                ) from None


def _root_cause(error: BaseException) -> str:
    """First line of the innermost error: the library wraps what went wrong."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _go_offline_if_the_hub_is_away(name: str) -> bool:
    """Ask the hub once, briefly; without an answer only its local cache is used, and no half minute of retries."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=4)
    except huggingface_hub.errors.HfHubHTTPError:
        return False  # the hub answered; what it says about the name is for the library to report
    except Exception:  # every HTTP client has its own errors for a network that is not there
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return True
    return False


class HfCorpus:
    """Documents through the `datasets` library: local text, jsonl or parquet files, or a hub name.

    In a .txt file a document is a paragraph (blank lines between); elsewhere it is a row.
    """

    def __init__(self, config: HfData) -> None:
        self._config = config
        suffix = Path(config.path).suffix
        self._files = [Path(name) for name in sorted(glob.glob(config.path))]
        self._is_local = suffix in _BUILDERS or bool(self._files)
        if self._is_local:
            self._check_files(suffix)

    def _check_files(self, suffix: str) -> None:
        path = self._config.path
        if not self._files:
            raise DataError(f"data.path={path}: no such file; give a file, a glob, or a dataset's name on the hub")
        if suffix not in _BUILDERS:
            raise DataError(f"data.path={path}: unknown kind of file; use .txt, .jsonl, .json or .parquet")
        if all(file.stat().st_size == 0 for file in self._files):
            raise DataError(f"data.path={path}: the file is empty; give one with text in it")
        if _BUILDERS[suffix] != "parquet" and self._config.on_bad_bytes == "stop":
            for file in self._files:
                check_utf8(file)

    def _load(self):  # noqa: ANN202 - datasets is imported lazily
        config = self._config
        hub_is_away = not self._is_local and _go_offline_if_the_hub_is_away(config.path)
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        try:
            if not self._is_local:
                return datasets.load_dataset(config.path, split=config.split)
            builder = _BUILDERS[Path(config.path).suffix]
            options = {"text": {"sample_by": "paragraph"}, "json": {}, "parquet": {}}[builder]
            if builder != "parquet" and config.on_bad_bytes == "replace":
                options["encoding_errors"] = "replace"
            return datasets.load_dataset(
                builder,
                data_files=[str(file) for file in self._files],
                split="train",
                cache_dir=str(Path(config.cache_dir).expanduser() / "datasets"),
                **options,
            )
        except Exception as error:  # the library raises many kinds; all mean that the data cannot be read
            remedy = "check the file" if self._is_local else "check the name and the network, or give a local file"
            reason = "the hub cannot be reached, its cache here has no copy" if hub_is_away else _root_cause(error)
            raise DataError(
                f"data.path={config.path}: the datasets library cannot read it ({reason}); {remedy}"
            ) from None

    def fingerprint(self) -> str:
        """Hash of the files' names, sizes and times, or of the hub name and split."""
        config = self._config
        parts = [config.path, config.split, config.text_field, config.on_bad_bytes]
        for file in self._files:
            status = file.stat()
            parts += [str(file.resolve()), str(status.st_size), str(status.st_mtime_ns)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Rows in order; the key is the row number."""
        rows = self._load()
        field = self._config.text_field
        if field not in rows.column_names:
            raise DataError(
                f"data.text_field={field}: {self._config.path} has no such column; it has "
                f"{', '.join(rows.column_names)}"
            )
        for number, row in enumerate(rows):
            text = row[field]
            if not isinstance(text, str | None):
                raise DataError(
                    f"data.text_field={field}: row {number} of {self._config.path} holds {type(text).__name__}, not "
                    "text; name a column with text"
                )
            yield Document(f"row {number}", text or "")
