"""Documents from somewhere: the Python standard library's source, local files, or a dataset on the hub."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megaasync.config.schema import HfData
from megaasync.data import DataError
from megaasync.data.identity import Notify, remembered_record
from megaasync.data.text_files import check_file, expand, kind_of, texts_of

_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


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


def _root_cause(error: BaseException) -> str:
    """First line of the innermost error: the library wraps what went wrong."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def content_key(text: str) -> str:
    """A document's key by what it says: rows and files before it, or its place among them, do not matter."""
    return hashlib.sha256(text.encode()).hexdigest()


class FileCorpus:
    """Documents of local text, jsonl, json or parquet files.

    In a .txt file a document is a paragraph (blank lines between); elsewhere it is a row.
    """

    def __init__(self, config: HfData, files: Sequence[Path], *, notify: Notify) -> None:
        """A corpus.

        Args:
            config: the data group.
            files: in the order that they are read in.
            notify: gets a progress line while large files are hashed.

        Raises:
            DataError: a file is not what its name says, or all are empty.
        """
        self._config, self._files, self._notify = config, files, notify
        for file in files:
            check_file(file)
        if all(file.stat().st_size == 0 for file in files):
            raise DataError(f"data.path={config.path}: the file is empty; give one with text in it")

    def fingerprint(self) -> str:
        """Hash of the files' contents and of what is read from them."""
        memory = Path(self._config.cache_dir).expanduser() / "hashes"
        parts = [self._config.text_field, self._config.on_bad_bytes]
        for file in self._files:
            parts += [str(kind_of(file)), remembered_record(file, memory, notify=self._notify).sha256]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Files in their order, rows in theirs; the key is a hash of the text."""
        config = self._config
        for file in self._files:
            replaces = config.on_bad_bytes == "replace"
            for text in texts_of(file, field=config.text_field, replace_bad_bytes=replaces):
                yield Document(content_key(text), text)


class HubCorpus:
    """Documents of a dataset on the Hugging Face hub, or of its copy in the hub's own cache."""

    def __init__(self, config: HfData) -> None:
        self._config = config
        self._rows: Any = None

    def _load(self) -> Any:
        """The dataset, loaded once: the `datasets` library keeps it by the commit on the hub."""
        if self._rows is not None:
            return self._rows
        config = self._config
        hub_is_away = _go_offline_if_the_hub_is_away(config.path)
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        try:
            self._rows = datasets.load_dataset(config.path, split=config.split)
        except Exception as error:  # the library raises many kinds; all mean that the data cannot be read
            reason = "the hub cannot be reached, its cache here has no copy" if hub_is_away else _root_cause(error)
            raise DataError(
                f"data.path={config.path}: the datasets library cannot read it ({reason}); check the name and the "
                "network, or give a local file"
            ) from None
        if config.text_field not in self._rows.column_names:
            raise DataError(
                f"data.text_field={config.text_field}: {config.path} has no such column; it has "
                f"{', '.join(self._rows.column_names)}"
            )
        return self._rows

    def fingerprint(self) -> str:
        """Hash of the name and of what the library tells two versions of a dataset apart by."""
        config = self._config
        parts = [config.path, config.split, config.text_field, self._load()._fingerprint]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        """Rows in order; the key is a hash of the text."""
        rows, field = self._load(), self._config.text_field
        for number, row in enumerate(rows.select_columns([field])):
            text = row[field]
            if not isinstance(text, str | None):
                raise DataError(
                    f"data.text_field={field}: row {number} of {self._config.path} holds {type(text).__name__}, not "
                    "text; name a column with text"
                )
            yield Document(content_key(text or ""), text or "")


def open_corpus(config: HfData, *, notify: Notify = lambda line: None) -> FileCorpus | HubCorpus:
    """The documents that `data.path` means: local files, or a name on the hub.

    Args:
        config: the data group.
        notify: gets a progress line while large files are hashed.

    Raises:
        DataError: there are no such files, or they cannot be what is asked for.
    """
    files = expand(config.path)
    if files:
        return FileCorpus(config, files, notify=notify)
    looks_local = kind_of(Path(config.path)) is not None or any(sign in config.path for sign in "*?[~\\")
    if looks_local or config.path.startswith(("/", ".")):
        raise DataError(f"data.path={config.path}: no such file; give a file, a glob, or a dataset's name on the hub")
    return HubCorpus(config)


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
