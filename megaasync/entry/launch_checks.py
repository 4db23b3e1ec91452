"""What a launch can see before a job waits in a queue for hours: tokens, tokenizer, checkpoint. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from megaasync.checkpoint.paths import inspect_checkpoint
from megaasync.config import Config, ConfigError
from megaasync.config.schema import DockerCluster, HfData, IndexedData, SlurmCluster
from megaasync.data.identity import identify_tokens
from megaasync.data.indexed_dataset import IndexedDataset
from megaasync.data.text_files import check_file, expand, kind_of
from megaasync.data.tokenizer import Tokenizer
from megaasync.distributed.environment import default_cache


def on_this_host(path: str, cluster: SlurmCluster | DockerCluster) -> str:
    """Where a path of the job lies on this host: a container has it under another name if a mount says so."""
    inside = Path(path).expanduser().absolute()
    for mount in cluster.mounts:
        host, _, rest = mount.partition(":")
        shown = Path(rest.partition(":")[0])
        if inside.is_relative_to(shown):
            return str(Path(host) / inside.relative_to(shown))
    return str(inside)


def check_files(config: Config) -> None:
    """The files that the run reads are there and fit.

    Raises:
        ConfigError, DataError: names the first that is not, and the remedy.
    """
    cluster, data = config.cluster, config.data
    if isinstance(data, IndexedData | HfData) and not data.path:
        raise ConfigError(f"data.path is empty: data={data.name} needs to know what to read; set data.path=...")
    hint = "; set cluster.check_files=false if only the nodes see it"
    if isinstance(data, IndexedData):
        for key, prefix in (("data.path", data.path), ("data.validation_path", data.validation_path)):
            if prefix is None:
                continue
            place = on_this_host(prefix, cluster)
            if not Path(f"{place}.idx").exists():
                raise ConfigError(
                    f"{key}={prefix}: {place}.idx does not exist here; make it with tools/preprocess_data.py, or set "
                    f"{key} to the prefix of a .bin and .idx pair{hint}"
                )
            IndexedDataset(place).check_ids(config.model.vocab_size)
            # hashed here, where nobody waits for it, and remembered
            identify_tokens(place, memory=default_cache() / "hashes", notify=print)
    if isinstance(data, HfData):
        place = on_this_host(data.path, cluster)
        files = expand(place)
        if not files and kind_of(Path(data.path)) is not None:
            raise ConfigError(f"data.path={data.path}: no such file here{hint}")
        for file in files:
            check_file(file)
        if data.tokenizer is not None:
            Tokenizer(on_this_host(data.tokenizer, cluster))
    requested = config.checkpoint.resume
    if (
        requested not in ("auto", "never")
        and not (found := inspect_checkpoint(Path(on_this_host(requested, cluster)))).is_complete
    ):
        raise ConfigError(f"checkpoint.resume={requested}: {found.problem}{hint}")


def needed_folders(config: Config) -> Iterator[Path]:
    """Folders of this host that a container needs for what the run reads and keeps beside its own folder."""
    data, requested = config.data, config.checkpoint.resume
    cache = getattr(data, "cache_dir", None)
    if cache is not None:
        folder = Path(cache).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    paths = [getattr(data, name, None) for name in ("path", "validation_path", "tokenizer")]
    paths += [] if requested in ("auto", "never") else [requested]
    for path in filter(None, paths):
        place = Path(path).expanduser().absolute()
        whole = next((folder for folder in (place, *place.parents) if "*" not in str(folder) and folder.is_dir()), None)
        if whole is not None and whole != Path("/"):
            yield whole
