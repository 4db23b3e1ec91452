"""Rules of the network."""

from megaasync.config.schema import Config, ConfigError


def check_attention(config: Config) -> None:
    """Heads divide the width, and key-value heads divide the heads."""
    model = config.model
    if model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads}: must divide model.hidden_size={model.hidden_size}; "
            f"{model.hidden_size} / {model.num_heads} is not whole"
        )
    if (model.hidden_size // model.num_heads) % 2:
        raise ConfigError(
            f"model.num_heads={model.num_heads}: the head size {model.hidden_size // model.num_heads} "
            "(model.hidden_size / model.num_heads) must be even for rotary positions"
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={model.num_kv_heads}: must divide model.num_heads={model.num_heads}; "
            "several query heads share one key-value head"
        )


def check_experts(config: Config) -> None:
    """The router can choose top_k experts."""
    moe = config.model.moe
    if moe is None:
        return
    if moe.top_k > moe.num_experts:
        raise ConfigError(
            f"model.moe.top_k={moe.top_k}: must be at most model.moe.num_experts={moe.num_experts}; "
            "a token cannot go to more experts than there are"
        )
    if moe.first_dense_layers > config.model.num_layers:
        raise ConfigError(
            f"model.moe.first_dense_layers={moe.first_dense_layers}: must be at most "
            f"model.num_layers={config.model.num_layers}"
        )
