"""BERT (Devlin et al. 2019) for masked words:
the mathematics of transformers' BertForMaskedLM, and its weights in and out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.transformer import Block, by_heads, by_kinds, init_weights
from trainkit.arguments import Fraction, NonNegativeInt, PositiveInt
from trainkit.errors import ConfigError

# This model's layers -> those of transformers.
_LAYERS = {
    "tokens": "bert.embeddings.word_embeddings",
    "places": "bert.embeddings.position_embeddings",
}
_LAYERS |= {"types": "bert.embeddings.token_type_embeddings", "norm": "bert.embeddings.LayerNorm"}
_LAYERS |= {
    "transform": "cls.predictions.transform.dense",
    "head_norm": "cls.predictions.transform.LayerNorm",
}
_LAYERS |= {"head": "cls.predictions.decoder"}
_OF_BLOCK = {"attention.qkv": "attention.self", "attention.out": "attention.output.dense"}
_OF_BLOCK |= {
    "norm1": "attention.output.LayerNorm",
    "wide.0": "intermediate.dense",
    "wide.2": "output.dense",
}
_OF_BLOCK |= {"norm2": "output.LayerNorm"}
_QKV = ("query", "key", "value")
# Of files with the task of the next sentence, which this model has not; and the head's bias, which
# has two names.
_LEFT_OUT = (
    "bert.pooler.",
    "cls.seq_relationship.",
    "bert.embeddings.position_ids",
    "cls.predictions.bias",
)
_EPS = 1e-12


class BERT(nn.Module):
    """Tokens [B, T] in, logits of the token at each place [B, T, V] out.

    Args:
        vocab_size: V, the number of different tokens.
        context: the longest input, in tokens.
        width: features of each token.
        depth: number of blocks.
        heads: of attention; they divide `width`.
        dropout: share of activations dropped while training.
        token_types: kinds of tokens (2: those of a first and a second sentence); 0 for none.
    """

    def __init__(
        self,
        vocab_size: PositiveInt = 30522,
        context: PositiveInt = 512,
        width: PositiveInt = 768,
        depth: PositiveInt = 12,
        heads: PositiveInt = 12,
        dropout: Fraction = 0.1,
        token_types: NonNegativeInt = 2,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.width = width
        self.heads = heads
        self.token_types = token_types
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.types = nn.Embedding(token_types, width) if token_types else None
        self.norm, self.dropout = nn.LayerNorm(width, _EPS), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, causal=False, eps=_EPS) for _ in range(depth)
        )
        self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width, _EPS)
        self.head = nn.Linear(width, vocab_size)
        init_weights(self)
        self.head.weight = self.tokens.weight  # tied

    def forward(
        self, tokens_BT: Tensor, mask_BT: Tensor | None = None, types_BT: Tensor | None = None
    ) -> Tensor:
        """Return the logits.

        Args:
            tokens_BT: numbers of tokens.
            mask_BT: 0 at padding, which no token sees; None if there is none.
            types_BT: the kind of each token; None: all 0.
        """
        T = tokens_BT.shape[1]
        if self.context < T:
            raise ConfigError(
                f"task.model.context is {self.context}; it must be {T} or more, for a text of {T}"
                " tokens."
            )
        x_BTD = self.tokens(tokens_BT) + self.places.weight[:T]
        if self.types is not None:
            x_BTD = x_BTD + self.types(
                torch.zeros_like(tokens_BT) if types_BT is None else types_BT
            )
        x_BTD = self.dropout(self.norm(x_BTD))
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_BT)
        return self.head(self.head_norm(functional.gelu(self.transform(x_BTD))))

    def _layers(self) -> dict[str, str]:
        blocks = ((i, *pair) for i in range(len(self.blocks)) for pair in _OF_BLOCK.items())
        return _LAYERS | {
            f"blocks.{i}.{ours}": f"bert.encoder.layer.{i}.{theirs}" for i, ours, theirs in blocks
        }

    def from_huggingface(self, weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the weights of a BertForMaskedLM or BertForPreTraining by this model's names;
        None if they are of another.
        """
        if f"{_LAYERS['tokens']}.weight" not in weights:
            return None
        # old files
        there = {
            name.replace(".gamma", ".weight").replace(".beta", ".bias"): t
            for name, t in weights.items()
        }
        if "cls.predictions.bias" in there:
            there["cls.predictions.decoder.bias"] = there["cls.predictions.bias"]
        for name in [name for name in there if ".attention.self.query." in name]:
            parts = [there.pop(name.replace("query", part)) for part in _QKV]
            there[name.replace(".query", "")] = by_heads(torch.cat(parts), self.heads)
        if self.types is None:  # transformers adds the first kind to all tokens
            places, types = (f"{_LAYERS[layer]}.weight" for layer in ("places", "types"))
            there[places] = there[places] + there.pop(types)[0]
        names, translated = {theirs: ours for ours, theirs in self._layers().items()}, {}
        for name, tensor in there.items():
            layer, _, kind = name.rpartition(".")
            if not name.startswith(_LEFT_OUT):
                translated[f"{names.get(layer, layer)}.{kind}"] = tensor
        return translated

    def settings(self) -> dict[str, Any]:
        """Return what changes the model's answers, and no weight's shape, by transformers' names."""
        return {
            "hidden_act": "gelu",
            "num_attention_heads": self.heads,
            "layer_norm_eps": _EPS,
        }

    def to_huggingface(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the config and the weights of a BertForMaskedLM."""
        names, translated = self._layers(), {}
        for name, tensor in self.state_dict().items():
            layer, _, kind = name.rpartition(".")
            if layer.endswith(".qkv"):
                parts = zip(_QKV, by_kinds(tensor, self.heads).chunk(3), strict=True)
                translated |= {
                    f"{names[layer]}.{part}.{kind}": rows.contiguous() for part, rows in parts
                }
            else:
                translated[f"{names[layer]}.{kind}"] = tensor
        translated["cls.predictions.bias"] = translated.pop("cls.predictions.decoder.bias")
        del translated["cls.predictions.decoder.weight"]  # tied
        if self.types is None:  # transformers always adds some
            translated["bert.embeddings.token_type_embeddings.weight"] = torch.zeros(1, self.width)
        config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]} | self.settings()
        config |= {
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context,
            "hidden_size": self.width,
        }
        config |= {
            "num_hidden_layers": len(self.blocks),
            "tie_word_embeddings": True,
            "intermediate_size": 4 * self.width,
            "type_vocab_size": self.token_types or 1,
        }
        config |= dict.fromkeys(
            ("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout.p
        )
        return config | {"pad_token_id": None}, translated
