"""The loss of next tokens: cross-entropy and z-loss, from the states before a model's output layer,
so that the logits of all tokens are never held.

token_loss   sums over a batch, some tokens at a time

A batch of 16 rows of 4,096 tokens and a vocabulary of 128,256 has 34 GB of logits in float32, and as
much again for their gradient; 1,024 tokens of it have 0.5 GB.

N tokens, D width of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainkit.extensions.language.packing import IGNORED

Head = Callable[[Tensor], Tensor]


class TokenLoss(NamedTuple):
    """Sums over the tokens that are predicted, in float32 at least.

    Attributes:
        cross_entropy: -log of the probability of the right token.
        z_loss: log^2 Z, times its factor; Z is the sum of a token's exponentiated logits.
    """

    cross_entropy: Tensor
    z_loss: Tensor


def token_loss(
    states_ND: Tensor,
    labels_N: Tensor,
    head: Head,
    chunk: int | None = None,
    z_loss: float = 0.0,
) -> TokenLoss:
    """Return the loss of `head(states)`.

    With `chunk` the logits of so many tokens are held at a time: they are computed again in
    backward, which costs one product with the head's matrix more. Values and gradients are the
    same, but for the order of sums.

    Args:
        states_ND: of the model's last norm.
        labels_N: the next token of each; IGNORED counts in no sum.
        head: the output layer, [n, D] to [n, V]; a module, not its weight, so that an engine which
            gathers weights, or an adapter, works as in a forward.
        chunk: tokens; None for all at once.
        z_loss: the factor of log^2 Z, which holds logits near 0; 1e-4 in PaLM (Chowdhery et al.
            2022, section 5).
    """
    if chunk is None or len(labels_N) <= chunk:
        return TokenLoss(*_sums(states_ND, labels_N, head, z_loss))
    parts = [
        checkpoint(_sums, states_nD, labels_n, head, z_loss, use_reentrant=False)
        for states_nD, labels_n in zip(
            torch.split(states_ND, chunk), torch.split(labels_N, chunk), strict=True
        )
    ]
    entropies, squares = zip(*parts, strict=True)
    return TokenLoss(torch.stack(entropies).sum(), torch.stack(squares).sum())


def _sums(states_ND: Tensor, labels_N: Tensor, head: Head, z_loss: float) -> tuple[Tensor, Tensor]:
    logits_NV = head(states_ND)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    log_z_N = logits_NV.logsumexp(-1)
    is_predicted_N = labels_N != IGNORED
    right_N = logits_NV.gather(-1, labels_N.where(is_predicted_N, 0)[:, None])[:, 0]
    entropy = (log_z_N - right_N).where(is_predicted_N, 0).sum()
    if not z_loss:
        return entropy, torch.zeros_like(entropy)
    return entropy, z_loss * log_z_N.square().where(is_predicted_N, 0).sum()
