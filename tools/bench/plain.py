"""A dense decoder and its training loop as anyone would write them with torch alone: what our step is held against."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megaasync.config import Config
from megaasync.config.schema import ModelConfig
from megaasync.data.microbatches import MicrobatchSource
from megaasync.models.initialize import initialize_
from megaasync.models.transformer import stage_shapes


def _rotary(length: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(length).float(), theta ** -(torch.arange(0, size, 2).float() / size))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self._size = config.hidden_size, config.hidden_size // config.num_heads
        self.attention_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.query = nn.Linear(width, self._size * config.num_heads, bias=False)
        self.key = nn.Linear(width, self._size * config.num_kv_heads, bias=False)
        self.value = nn.Linear(width, self._size * config.num_kv_heads, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.gate = nn.Linear(width, config.ffn_hidden_size, bias=False)
        self.up = nn.Linear(width, config.ffn_hidden_size, bias=False)
        self.down = nn.Linear(config.ffn_hidden_size, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._size)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def rotate(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * cos + torch.cat([-second, first], dim=-1) * sin

        normed = self.attention_norm(x)
        query, key = rotate(self._heads(self.query(normed))), rotate(self._heads(self.key(normed)))
        mixed = F.scaled_dot_product_attention(
            query, key, self._heads(self.value(normed)), is_causal=True, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class PlainDecoder(nn.Module):
    """The model of a dense config with untied embeddings, in float32; parameters in the order of our whole model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.cos, self.sin = _rotary(config.seq_length, config.hidden_size // config.num_heads, config.rope_theta)
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[B, S] int64 both, to the scalar mean loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.final_norm(x)).flatten(0, 1), labels.flatten())

    def draw_as_ours(self, config: ModelConfig, *, seed: int) -> None:
        """Take the initial weights of our model of the same config."""
        names = stage_shapes(config, range(config.num_layers))
        initialize_(dict(zip(names, self.parameters(), strict=True)), config, seed=seed)


def train_plainly(
    model: PlainDecoder, config: Config, source: MicrobatchSource, *, on_step: Callable[[float], None]
) -> None:
    """AdamW with torch's fastest step, global clipping, and gradients summed over microbatches.

    Args:
        model: to train.
        config: with `optimizer=adamw` and a constant lr.
        source: of the microbatches.
        on_step: given the loss after each step.
    """
    rule = config.optimizer
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=rule.lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay, fused=True
    )
    for step in range(config.train.steps):
        losses = []
        for number in range(config.num_microbatches):
            microbatch = source.get(step, number)
            loss = model(microbatch.tokens_BS, microbatch.labels_BS) / config.num_microbatches
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        on_step(sum(losses).item())
