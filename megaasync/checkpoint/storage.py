"""What lies where in a checkpoint's files, as JSON: reading a checkpoint unpickles nothing.

torch.distributed.checkpoint keeps this in `.metadata`, a pickle, and a pickle runs whatever code is in it. It is still
written, for torch's own tools, and not read: `tensors.json` has the same. Checkpoints of before have `.metadata` only;
it goes through an unpickler that knows nothing but the classes that such a file is made of.
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import WriteResult, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megaasync.checkpoint.paths import PICKLED, TENSORS
from megaasync.config.schema import ConfigError
from megaasync.observe.run_files import write_text

_FORMAT = 1
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}
# the globals of a `.metadata` that this program has written, and no others
_GLOBALS = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "TensorProperties",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        )),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # its name on Python 3.13
        *(("torch", name) for name in _DTYPES),
    }
)  # fmt: skip


def _to_json(metadata: Metadata) -> dict[str, Any]:
    places: dict[str, dict[tuple[int, ...], _StorageInfo]] = {}
    for index, place in metadata.storage_data.items():
        places.setdefault(index.fqn, {})[tuple(index.offset)] = place
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        chunks = []
        for chunk in tensor.chunks:
            place = places[name][tuple(chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    "file": place.relative_path,
                    "start": place.offset,
                    "length": place.length,
                }
            )
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
    return {"format": _FORMAT, "tensors": tensors}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _fits(offset: int, size: int, length: int) -> bool:
    return offset + size <= length


def _file_name(value: Any) -> str:
    """A file of the checkpoint's own folder: its index leads nowhere else."""
    if not isinstance(value, str) or value != Path(value).name or not value.endswith(".distcp"):
        raise ValueError(f"{value!r} is no file of a checkpoint")
    return value


def _from_json(content: Mapping[str, Any]) -> Metadata:
    """
    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is not what `_to_json` makes.
    """
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']}, this program reads {_FORMAT}")
    tensors, storage = {}, {}
    for name, tensor in content["tensors"].items():
        chunks = []
        for chunk in tensor["chunks"]:
            offsets, sizes = (torch.Size(map(_whole, chunk[key])) for key in ("offsets", "sizes"))
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            place = _StorageInfo(_file_name(chunk["file"]), _whole(chunk["start"]), _whole(chunk["length"]))
            storage[MetadataIndex(name, offsets)] = place
        properties, shape = TensorProperties(dtype=_DTYPES[tensor["dtype"]]), torch.Size(map(_whole, tensor["shape"]))
        if sum(chunk.sizes.numel() for chunk in chunks) != shape.numel() or not all(
            len(chunk.offsets) == len(shape) and all(map(_fits, chunk.offsets, chunk.sizes, shape)) for chunk in chunks
        ):
            raise ValueError(f"the parts of {name} are not the whole of it")
        tensors[name] = TensorStorageMetadata(properties, shape, chunks)
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


class JsonWriter(dcp.FileSystemWriter):
    """torch's writer, with `tensors.json` beside its `.metadata`."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write both, on the rank that coordinates."""
        super().finish(metadata, results)
        write_text(Path(self.path) / TENSORS, json.dumps(_to_json(metadata)) + "\n")


class JsonReader(dcp.FileSystemReader):
    """torch's reader, which takes from JSON what torch takes from a pickle; tensors are read with weights_only."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read which chunk of which tensor lies in which file.

        Raises:
            ConfigError: it cannot be read.
        """
        return read_metadata(Path(self.path))


def read_metadata(folder: Path) -> Metadata:
    """What lies where in a checkpoint.

    Raises:
        ConfigError: it cannot be read, or an old one holds what no checkpoint of ours has.
    """
    path = folder / TENSORS
    if not path.exists():
        return _read_old(folder / PICKLED)
    try:
        return _from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint {folder}: {TENSORS} cannot be read ({error}); take an older one with checkpoint.resume=FOLDER"
        ) from None


class _KnownClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class("pathlib" if module == "pathlib._local" else module, name)


def _read_old(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _KnownClasses(file).load()
        for place in metadata.storage_data.values():
            _file_name(place.relative_path)
    except Exception as error:  # a foreign file may fail in any way
        raise ConfigError(
            f"checkpoint {path.parent}: its {PICKLED} is not one that this program has written ({error}); nothing of "
            "it was run; take another checkpoint"
        ) from None
    return metadata
