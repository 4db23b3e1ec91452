"""Where tokens come from: group `data`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaasync.fields import Range


@dataclass(frozen=True, slots=True)
class PythonStdlibData:
    """The Python standard library's own source text, split into train and validation by file.

    Attributes:
        cache_dir: where tokenizer and indexed token files are kept.
        validation_fraction: share of documents held out.
        tokenizer_bytes: most text that the tokenizer is trained on, sampled evenly over all of it.
    """

    name: Literal["python_stdlib"]
    cache_dir: str
    validation_fraction: Annotated[float, Range(at_least=0, below=1)]
    tokenizer_bytes: Annotated[int, Range(at_least=1000)] = 32_000_000


@dataclass(frozen=True, slots=True)
class SyntheticData:
    """Tokens of a seeded random Markov chain: learnable, made without a file.

    Attributes:
        num_tokens: length of the training stream; the validation stream has a tenth of it.
        branching: successors of each token.
    """

    name: Literal["synthetic"]
    num_tokens: int
    branching: Annotated[int, Range(at_least=1)]


@dataclass(frozen=True, slots=True)
class IndexedData:
    """Token files in Megatron's MMIDIDX layout.

    Attributes:
        path: prefix of the training files: `path`.bin and `path`.idx.
        validation_path: prefix of the validation files; null for no validation.
    """

    name: Literal["indexed"]
    path: str
    validation_path: str | None


@dataclass(frozen=True, slots=True)
class HfData:
    """Local text, jsonl, json or parquet files, or a dataset on the Hugging Face hub.

    Attributes:
        path: a file, a folder, a glob (`**` is recursive), or the name of a dataset on the hub.
        split: split to read.
        text_field: column with the text.
        tokenizer: a sentencepiece model file; null trains one on this data.
        cache_dir: where tokenizer and indexed token files are kept.
        validation_fraction: share of documents held out.
        tokenizer_bytes: most text that a tokenizer is trained on, sampled evenly over all files and documents.
        on_bad_bytes: what to do about a text file that is not UTF-8.
    """

    name: Literal["hf"]
    path: str
    split: str
    text_field: str
    tokenizer: str | None
    cache_dir: str
    validation_fraction: Annotated[float, Range(at_least=0, below=1)]
    on_bad_bytes: Literal["stop", "replace"]
    tokenizer_bytes: Annotated[int, Range(at_least=1000)] = 32_000_000


DataConfig = PythonStdlibData | SyntheticData | IndexedData | HfData
