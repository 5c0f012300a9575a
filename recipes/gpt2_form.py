"""The form of transformers' GPT2LMHeadModel, for models of GPT-2's shape: their weights in and out.

Its matrices are transposed, [in, out], and its rows of queries, keys and values are ordered by kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from recipes.transformer import by_heads, by_kinds

# A model's layers -> those of transformers.
_LAYERS = {"tokens": "wte", "places": "wpe", "norm": "ln_f", "head": "lm_head"}
_OF_BLOCK = {"norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
_OF_BLOCK |= {"norm2": "ln_2", "wide.0": "mlp.c_fc", "wide.2": "mlp.c_proj"}
_TRANSPOSED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
EPS = 1e-5  # of the norms


class GPT2Form(nn.Module, ABC):
    """A model of GPT-2's shape, whose layers have the names above, and whose head is tied.

    Attributes:
        vocab_size: the number of different tokens.
        context: the longest input, in tokens.
        heads: of attention.
        blocks: in their order.
        activation: transformers' name of what the wide layers have.
    """

    vocab_size: int
    context: int
    heads: int
    blocks: nn.Sequential
    activation = "gelu_new"  # GPT-2's own

    @abstractmethod
    def dropouts(self) -> dict[str, float]:
        """Return the shares that transformers drops: resid_pdrop, embd_pdrop, attn_pdrop."""

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

    def settings(self) -> dict[str, Any]:
        """Return what changes the model's answers, and no weight's shape, by transformers' names."""
        return {
            "activation_function": self.activation,
            "n_head": self.heads,
            "layer_norm_epsilon": EPS,
        }

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
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | self.settings()
        config |= {
            "vocab_size": self.vocab_size,
            "n_positions": self.context,
            "n_embd": translated["transformer.wte.weight"].shape[1],
            "n_layer": len(self.blocks),
            "tie_word_embeddings": True,
        }
        config |= self.dropouts()
        return config | {"bos_token_id": None, "eos_token_id": None}, translated
