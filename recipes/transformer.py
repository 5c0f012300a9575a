"""The block of GPT-2 and BERT: self-attention and a wide layer, and how transformers' weights
become this one's.

B batch, T tokens, D width, H heads, K width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from trainkit.errors import ConfigError
from trainkit.extensions.context.sequence import attention


class Attention(nn.Module):
    """Self-attention. The outputs of `qkv` are ordered by head (H, 3, K), so that ranks can share
    them by heads.

    H is then the number of heads on this rank.
    """

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"task.model.heads is {heads}; it must divide task.model.width={width}. Change one."
            )
        self.width_of_head, self.dropout, self.causal = width // heads, dropout, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        B, T, _ = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            self.qkv(x_BTD).view(B, T, -1, 3, self.width_of_head).transpose(1, 2).unbind(3)
        )
        mask = None if mask_BT is None else mask_BT.bool()[:, None, None, :]
        dropout = self.dropout if self.training else 0.0
        y_BHTK = attention(q_BHTK, k_BHTK, v_BHTK, mask, dropout, self.causal)
        return self.out(y_BHTK.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    """Attention and a wide layer, each added to its input.

    Args:
        width: features of each token.
        heads: of attention.
        dropout: share of activations dropped while training.
        causal: whether a token sees those before it alone, and norms stand before the layers, as in
            GPT-2; else a token sees all, and norms stand after the sums, as in BERT.
        eps: of the norms.
    """

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, eps: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, causal)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        gelu = nn.GELU("tanh" if causal else "none")
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.dropout, self.norm_first = nn.Dropout(dropout), causal

    def forward(self, x_BTD: Tensor, mask_BT: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD), mask_BT))
            return x_BTD + self.dropout(self.wide(self.norm2(x_BTD)))
        x_BTD = self.norm1(x_BTD + self.dropout(self.attention(x_BTD, mask_BT)))
        return self.norm2(x_BTD + self.dropout(self.wide(x_BTD)))


def plan_of_blocks(heads: int, ranks: int) -> dict[str, str]:
    """Return how `ranks` ranks share the blocks of a Task's `model`: attention by heads, wide
    layers by width.

    As in Megatron-LM (Shoeybi et al. 2019). Embeddings, the head that shares their weight, and
    norms are whole on each rank.

    Raises:
        ConfigError: the ranks do not divide the heads.
    """
    if heads % ranks:
        raise ConfigError(
            f"engine.tensor is {ranks}; it must divide task.model.heads={heads}: ranks share"
            " attention by heads."
        )
    layers = {
        "attention.qkv": "colwise",
        "attention.out": "rowwise",
        "wide.0": "colwise",
        "wide.2": "rowwise",
    }
    return {f"model.blocks.*.{layer}": style for layer, style in layers.items()}


def init_weights(model: nn.Module, sum_std: float = 0.02) -> None:
    """Draw weights as for GPT-2 and BERT: std 0.02, biases 0;
    of layers that add to their input, `sum_std`.
    """
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            nn.init.normal_(layer.weight, std=0.02)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    for block in model.modules():
        if isinstance(block, Block):
            for layer in (block.attention.out, block.wide[2]):
                nn.init.normal_(layer.weight, std=sum_std)


def by_heads(qkv: Tensor, heads: int) -> Tensor:
    """Return rows (3, H, K), which transformers has, as (H, 3, K)."""
    return qkv.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def by_kinds(qkv: Tensor, heads: int) -> Tensor:
    """Return rows (H, 3, K) as (3, H, K): the inverse of `by_heads`."""
    return qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
