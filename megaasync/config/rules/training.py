"""Rules of the training loop: kernels, documents, restarts."""

from megaasync.config.schema import Config, ConfigError


def check_kernels(config: Config) -> None:
    """The backend can do what is asked of it."""
    train, model = config.train, config.model
    if config.kernels == "te" and train.dtype == "float64":
        raise ConfigError("kernels=te: Transformer Engine has no float64; set train.dtype=bfloat16 or kernels=torch")
    if config.kernels == "te" and config.device == "cpu":
        raise ConfigError("kernels=te: Transformer Engine needs a GPU, but device=cpu; set kernels=torch")
    if train.fp8 == "none":
        return
    if config.kernels != "te" or train.dtype != "bfloat16":
        raise ConfigError(
            f"train.fp8={train.fp8}: only Transformer Engine has it, beside bfloat16, but kernels={config.kernels} and "
            f"train.dtype={train.dtype}; set kernels=te train.dtype=bfloat16, or train.fp8=none"
        )
    ranks, moe, head_size = config.parallel.tensor, model.moe, model.hidden_size // model.num_heads
    block = 32 if train.fp8 == "mxfp8" else 16
    widths = {
        "model.hidden_size": model.hidden_size,
        "model.hidden_size / parallel.tensor": model.hidden_size // ranks,
        "head size x model.num_kv_heads / parallel.tensor": head_size * model.num_kv_heads // ranks,
    }
    if moe is None or moe.first_dense_layers:
        widths["model.ffn_hidden_size / parallel.tensor"] = model.ffn_hidden_size // ranks
    if moe is not None:
        widths["model.moe.ffn_hidden_size"] = moe.ffn_hidden_size
        widths["model.moe.ffn_hidden_size x num_shared_experts / parallel.tensor"] = (
            moe.ffn_hidden_size * moe.num_shared_experts // ranks
        )
    for name, width in widths.items():
        if width % block:
            raise ConfigError(
                f"train.fp8={train.fp8}: matrices must be multiples of {block} wide on each rank, but {name} is "
                f"{width}; change it, or set train.fp8=none"
            )
    tokens = train.micro_batch_size * model.seq_length
    if tokens % block:
        raise ConfigError(
            f"train.fp8={train.fp8}: a microbatch must have a multiple of {block} tokens, but train.micro_batch_size x "
            f"model.seq_length is {tokens}; change one of them, or set train.fp8=none"
        )


def check_documents(config: Config) -> None:
    """There are documents to attend within."""
    if config.train.document_mask and config.data.name == "synthetic":
        raise ConfigError(
            "train.document_mask=true: data=synthetic has no documents; set train.document_mask=false or other data"
        )


def check_restarts(config: Config) -> None:
    """A restart has a checkpoint to go on from."""
    if config.run.max_restarts and config.checkpoint.interval is None:
        raise ConfigError(
            f"run.max_restarts={config.run.max_restarts}: a restart goes on from a checkpoint, but "
            "checkpoint.interval=null makes none; set checkpoint.interval"
        )
