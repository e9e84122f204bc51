"""A small byte-level GPT in plain torch; dropout is on, so that a wrong random state shows in every loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`; the defaults give 0.6 million parameters, so a snapshot spans more than one chunk."""

    vocabulary: int = 256
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 3
    dropout: float = 0.1


class Block(nn.Module):
    """Causal self-attention and a feed-forward part, each with its residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.wide = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Activations float32 [batch, time, width] in, the same out. Local."""
        batch, time, width = x.shape
        heads = (
            self.attention(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], dropout_p=dropout, is_causal=True)
        seen = seen.transpose(1, 2).reshape(batch, time, width)
        x = x + F.dropout(self.projection(seen), self.dropout, self.training)
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next byte; input and output embedding are one tensor, so shared storage is exercised too."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of int64 `inputs` and `targets`, both [batch, time]. Local."""
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
