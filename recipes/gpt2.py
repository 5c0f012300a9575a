"""GPT-2 (Radford et al. 2019): the mathematics of transformers' GPT2LMHeadModel,
and its weights in and out.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from recipes.transformer import Block, by_heads, by_kinds, init_weights
from trainkit.arguments import Fraction, PositiveInt
from trainkit.errors import ConfigError
from trainkit.extensions.context.sequence import rows, whole_length

# This model's layers -> those of transformers; its matrices are transposed, [in, out].
_LAYERS = {"tokens": "wte", "places": "wpe", "norm": "ln_f", "head": "lm_head"}
_OF_BLOCK = {"norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
_OF_BLOCK |= {"norm2": "ln_2", "wide.0": "mlp.c_fc", "wide.2": "mlp.c_proj"}
_TRANSPOSED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_EPS = 1e-5


class GPT2(nn.Module):
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
            *(Block(width, heads, dropout, causal=True, eps=_EPS) for _ in range(depth))
        )
        self.norm, self.head = nn.LayerNorm(width, _EPS), nn.Linear(width, vocab_size, bias=False)
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

    def _layers(self) -> dict[str, str]:
        blocks = ((i, *pair) for i in range(len(self.blocks)) for pair in _OF_BLOCK.items())
        return _LAYERS | {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for i, ours, theirs in blocks}

    def from_huggingface(self, weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the weights of a GPT2LMHeadModel or GPT2Model by this model's names;
        None if they are of another model.
        """
        masks = (".attn.bias", ".attn.masked_bias")  # constants, in old files
        there = {
            name.removeprefix("transformer."): t
            for name, t in weights.items()
            if not name.endswith(masks)
        }
        if "wte.weight" not in there:
            return None
        names, translated = {theirs: ours for ours, theirs in self._layers().items()}, {}
        for name, tensor in there.items():
            layer, _, kind = name.rpartition(".")
            tensor = tensor.T if layer.endswith(_TRANSPOSED) and kind == "weight" else tensor
            tensor = by_heads(tensor, self.heads) if layer.endswith("c_attn") else tensor
            translated[f"{names.get(layer, layer)}.{kind}"] = tensor
        return translated

    def to_huggingface(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the config and the weights of a GPT2LMHeadModel."""
        names, translated = self._layers(), {}
        for name, tensor in self.state_dict().items():
            layer, _, kind = name.rpartition(".")
            theirs = names[layer]
            tensor = by_kinds(tensor, self.heads) if theirs.endswith("c_attn") else tensor
            tensor = tensor.T if theirs.endswith(_TRANSPOSED) and kind == "weight" else tensor
            translated[f"transformer.{theirs}.{kind}"] = tensor.contiguous()
        del translated["transformer.lm_head.weight"]  # tied
        config = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
        }
        config |= {
            "vocab_size": self.vocab_size,
            "n_positions": self.context,
            "n_embd": self.width,
            "n_head": self.heads,
        }
        config |= {
            "n_layer": len(self.blocks),
            "layer_norm_epsilon": _EPS,
            "tie_word_embeddings": True,
        }
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), self.dropout.p)
        return config | {"bos_token_id": None, "eos_token_id": None}, translated
