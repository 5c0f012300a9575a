"""GPT-2 (Radford et al. 2019): the mathematics of transformers' GPT2LMHeadModel; its weights in and
out are those of recipes/gpt2_form.py.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from recipes.gpt2_form import EPS, GPT2Form
from recipes.transformer import Block, init_weights
from trainkit.arguments import Fraction, PositiveInt
from trainkit.errors import ConfigError
from trainkit.extensions.context.sequence import rows, whole_length


class GPT2(GPT2Form):
    """Tokens [B, T] in, logits of the next token [B, T, V] out.

    Args:
        vocab_size: V, the number of different tokens.
        context: the longest input, in tokens.
        width: features of each token.
        depth: number of blocks.
        heads: of attention; they divide `width`.
        dropout: share of activations dropped while training; 0.1 when data is read several times.
    """

    def __init__(
        self,
        vocab_size: PositiveInt = 50257,
        context: PositiveInt = 1024,
        width: PositiveInt = 768,
        depth: PositiveInt = 12,
        heads: PositiveInt = 12,
        dropout: Fraction = 0.0,
    ) -> None:
        super().__init__()
        self.vocab_size, self.context, self.width, self.heads = vocab_size, context, width, heads
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, dropout, causal=True, eps=EPS) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width, EPS), nn.Linear(width, vocab_size, bias=False)
        init_weights(self, sum_std=0.02 / math.sqrt(2 * depth))
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.states(tokens_BT))

    def states(self, tokens_BT: Tensor) -> Tensor:
        """Return what the output layer reads, [B, T, D]."""
        T = tokens_BT.shape[1]
        if self.context < (whole := whole_length(T)):
            raise ConfigError(
                f"task.model.context is {self.context}; it must be {whole} or more, for a text of"
                f" {whole} tokens."
            )
        x_BTD = self.dropout(self.tokens(tokens_BT) + rows(self.places.weight, T))
        return self.norm(self.blocks(x_BTD))

    def dropouts(self) -> dict[str, float]:
        """Return the shares that transformers drops; GPT-2 has one for all."""
        return dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout.p)
