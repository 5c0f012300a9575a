"""Logits of the next token of several texts at once, which need not be equally long.

Whole    of any model from tokens to logits: each text is read again for each token
Cached   of a causal model of transformers: by its cache, a token is read once

B texts, T tokens, V entries of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainkit.run.evaluator import evaluating

Ids = list[int]


class Reader(Protocol):
    """Reads texts that grow by a token between two calls.

    Attributes:
        can_batch: whether it reads several.
    """

    can_batch: bool

    def read(self, texts: Sequence[Ids]) -> Tensor:
        """Return the logits [B, V] of the token after each text."""

    def keep(self, places: Sequence[int]) -> None:
        """Continue with the texts at these places alone."""


def _without_dropout(model: Any) -> AbstractContextManager[None]:
    """Return a context of eval mode: a hook may ask in the midst of training, whose random numbers
    dropout would draw.
    """
    trains = isinstance(model, nn.Module) and model.training
    return evaluating(model) if trains else nullcontext()


class Whole:
    """Texts padded on the right, where no token before sees the padding."""

    can_batch = True

    def __init__(self, forward: Callable[[Tensor], Tensor], context: int, device: Any) -> None:
        """Build it.

        Args:
            forward: causal, from tokens [B, T] to logits [B, T, V].
            context: tokens before the last so many have no effect.
            device: of the tokens.
        """
        self._forward, self._context, self._device = forward, context, device

    @torch.no_grad()
    def read(self, texts: Sequence[Ids]) -> Tensor:
        """See Reader."""
        windows = [text[-self._context :] for text in texts]
        longest = max(map(len, windows))
        padded = [window + [0] * (longest - len(window)) for window in windows]
        with _without_dropout(self._forward):
            logits_BTV = self._forward(torch.tensor(padded, device=self._device))
        last_B = torch.tensor([len(window) - 1 for window in windows], device=self._device)
        return logits_BTV[torch.arange(len(windows), device=self._device), last_B]

    def keep(self, places: Sequence[int]) -> None:
        """See Reader."""


class Cached:
    """Texts padded on the left, so that all grow at the same end; positions count from each text's
    own first token, and padding is masked.

    A model without a cache, or with a state that padding would enter (Mamba), reads one text.
    """

    def __init__(self, model: Any) -> None:
        """Build it; `model` is called in eval mode."""
        taken = inspect.signature(getattr(model, "forward", model)).parameters
        self._model = model
        self._takes = {*taken}
        self.can_batch = {"past_key_values", "attention_mask"} <= self._takes and not getattr(
            model, "_is_stateful", False
        )
        self._cache: Any = None
        self._mask_BT: Tensor | None = None

    @torch.no_grad()
    def read(self, texts: Sequence[Ids]) -> Tensor:
        """See Reader."""
        device = self._model.device
        if self._cache is None:
            longest = max(map(len, texts))
            gaps = [longest - len(text) for text in texts]
            fed = [[0] * gap + text for gap, text in zip(gaps, texts, strict=True)]
            if any(gaps):
                rows = [[0] * gap + [1] * (longest - gap) for gap in gaps]
                self._mask_BT = torch.tensor(rows, device=device)
        else:
            fed = [text[-1:] for text in texts]
            if self._mask_BT is not None:
                self._mask_BT = torch.cat([self._mask_BT, self._mask_BT.new_ones(len(fed), 1)], 1)
        ids_BT = torch.tensor(fed, device=device)
        more: dict[str, Any] = {}
        if self._mask_BT is not None:
            more["attention_mask"] = self._mask_BT
            if "position_ids" in self._takes:
                places_BT = (self._mask_BT.cumsum(1) - 1).clamp(min=0)
                more["position_ids"] = places_BT[:, -ids_BT.shape[1] :]
        if "logits_to_keep" in self._takes:
            more["logits_to_keep"] = 1
        with _without_dropout(self._model):
            out = self._model(input_ids=ids_BT, past_key_values=self._cache, use_cache=True, **more)
        self._cache = getattr(out, "past_key_values", None)
        logits_BV: Tensor = out.logits[:, -1].float()
        return logits_BV

    def keep(self, places: Sequence[int]) -> None:
        """See Reader."""
        chosen = torch.tensor(places, device=self._model.device)
        if self._cache is not None:
            self._cache.batch_select_indices(chosen)
        if self._mask_BT is not None:
            self._mask_BT = self._mask_BT[chosen]


class CachedWithin:
    """By the cache as long as all texts fit the model's positions, then as windows."""

    can_batch = True

    def __init__(self, model: Any, whole: Whole, context: int) -> None:
        """Build it of a model of transformers, and of how it is read without a cache."""
        self._cached: Cached | None = Cached(model)
        self._whole, self._context = whole, context

    def read(self, texts: Sequence[Ids]) -> Tensor:
        """See Reader."""
        if max(map(len, texts)) > self._context:
            self._cached = None
        return (self._cached or self._whole).read(texts)

    def keep(self, places: Sequence[int]) -> None:
        """See Reader."""
        if self._cached is not None:
            self._cached.keep(places)
