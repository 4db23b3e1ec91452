"""Rules of the data that need no file to judge."""

from pathlib import PurePath

from megaasync.config.schema import Config, ConfigError

# 256 byte pieces, three control pieces, and a few letters: below this a byte-fallback tokenizer cannot be trained.
SMALLEST_TRAINED_VOCABULARY = 400


def check_data(config: Config) -> None:
    """Data settings that need no file to judge."""
    data = config.data
    trains_tokenizer = data.name == "python_stdlib" or (data.name == "hf" and data.tokenizer is None)
    if trains_tokenizer and config.model.vocab_size < SMALLEST_TRAINED_VOCABULARY:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: a tokenizer with byte fallback needs at least "
            f"{SMALLEST_TRAINED_VOCABULARY} pieces; set model.vocab_size={SMALLEST_TRAINED_VOCABULARY} or more"
        )
    if data.name == "synthetic":
        if data.num_tokens <= config.model.seq_length:
            raise ConfigError(
                f"data.num_tokens={data.num_tokens}: must be above model.seq_length={config.model.seq_length}"
            )
        if data.branching > config.model.vocab_size:
            raise ConfigError(
                f"data.branching={data.branching}: must be at most model.vocab_size={config.model.vocab_size}"
            )
    if (
        data.name == "hf"
        and data.split != "train"
        and PurePath(data.path).suffix in (".txt", ".jsonl", ".json", ".parquet")
    ):
        raise ConfigError(f"data.split={data.split}: local files have only the split train; set data.split=train")
    # on a cluster that is only planned for, the plan comes first; `megaasync.launch` asks for the path then
    is_planned = config.dry_run or config.cluster.name != "local"
    if data.name in ("indexed", "hf") and not data.path and not is_planned:
        raise ConfigError(f"data.path is empty: data={data.name} needs to know what to read; set data.path=...")
