"""What a Task and its layers call so that ranks share the tokens of each sample (engine.context).

    part            of inputs, labels and positions: this rank's tokens
    attention       of this rank's queries, on the keys of all ranks
    rows            of a table of positions: those of this rank's tokens
    sum_of_parts    of a sum over tokens: that over the tokens of all ranks
    mean_of_parts   of a mean over tokens, where all ranks have as many

    def training_step(self, batch, batch_idx):
        tokens = part(batch[:, :-1])
        labels = part(batch[:, 1:])                     # shifted before they are cut
        total = cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        return sum_of_parts(total) / batch[:, 1:].numel()

Without context ranks, and in a step that takes no part, they do what one process does:
`part` returns what it is given, `attention` is torch's call. All ranks of a group read the same
batch, and have the same loss; each has the gradient of its own tokens, which the engine sums.

B batch, H heads, T tokens of this rank, K width of a head.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.errors import TaskError
from trainkit.extensions.context.parts import (
    attend_all,
    attend_before,
    joined,
    padded,
    part_of,
    same_document,
)
from trainkit.extensions.fsdp.random_numbers import drawn_seed, numbers_of


class SampleRanks(Protocol):
    """The ranks that share the tokens of a sample.

    Attributes:
        place: of this rank, from 0.
        ranks: their number.
    """

    place: int
    ranks: int

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return what each rank has; all have as much."""

    def scatter_sum(self, of_ranks: list[Tensor]) -> Tensor:
        """Return the sum of what all ranks have for this one.

        Args:
            of_ranks: what this rank has for each.
        """

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over ranks, equal on all."""


class SharedStep:
    """A step of a Task, on ranks that share the tokens of its samples.

    Random numbers that the step draws before it takes its part are equal on these ranks; those that
    a training step draws after it, as for dropout, are each rank's own.

    Attributes:
        open: the step that is under way in this process; None for none.
        newest: the step that was open last, whose backward may come.
        name: training_step, ...
        length: tokens of the whole sequence, None until the step takes its part.
        size: tokens of the sequence with what fills it up.
        documents_BT: the numbers of the whole sequence's documents, for attention that is not
            given them (transformers.py).
        attends: whether a layer has called `attention` on a part.
        sums: whether sums over the ranks were taken.
    """

    open: ClassVar[SharedStep | None] = None
    newest: ClassVar[SharedStep | None] = None

    def __init__(self, group: SampleRanks, name: str) -> None:
        self.group, self.name = group, name
        self.length: int | None = None
        self.size = 0
        self.documents_BT: Tensor | None = None
        self.attends = self.sums = False
        self._numbers = contextlib.ExitStack()

    @property
    def tokens(self) -> int:
        """Those of this rank."""
        return self.size // self.group.ranks

    def cut(self, length: int, fills: bool) -> None:
        """Cut the step's sequence, or check that one more is as long.

        Args:
            fills: whether what is cut can be filled up.

        Raises:
            TaskError: it is not, or it cannot be cut.
        """
        unit = 2 * self.group.ranks
        size = -(-length // unit) * unit
        if size != length and not fills:
            raise TaskError(
                f"engine.context is {self.group.ranks}, and {self.name} takes its part of a sequence"
                f" of {length} tokens, which cannot be cut into {unit} chunks of as many. Let the"
                f" data have {size} tokens (of each window that the model reads), or give"
                " part(..., fill=...) what fills it up, as -100 for labels that count in no loss."
            )
        if self.length not in (None, length):
            raise TaskError(
                f"engine.context is {self.group.ranks}, and {self.name} takes its part of a sequence"
                f" of {length} tokens after one of {self.length}. Sequences of a step must be equally"
                " long: shift labels before they are cut, and fill shorter sequences up."
            )
        if self.length is None:
            self.length, self.size = length, size
            if self.name == "training_step":
                self._numbers.enter_context(numbers_of(drawn_seed() + self.group.place))

    def own(self, tensor: Tensor, dim: int, fill: float = 0.0) -> Tensor:
        """Return this rank's part of a tensor of the whole sequence."""
        filled = padded(tensor, dim, self.size, fill)
        return part_of(filled, dim, self.group.place, self.group.ranks)

    def check(self, tokens: int) -> None:
        """Refuse a layer that does not have this rank's tokens.

        Raises:
            TaskError: it has another number of them.
        """
        if tokens != self.tokens:
            raise TaskError(
                f"engine.context is {self.group.ranks}, and a layer has {tokens} tokens where"
                f" {self.name} has taken its part, {self.tokens} tokens of a sequence of"
                f" {self.length}. Give the model part(tokens), and all else that belongs to tokens"
                " too."
            )

    def end(self) -> None:
        """Let random numbers continue as they were before the cut."""
        self._numbers.close()


def _step() -> SharedStep | None:
    """Return the step that has taken its part; None: sequences are whole."""
    step = SharedStep.open
    return None if step is None or step.length is None else step


def is_shared() -> bool:
    """Return whether a step is under way whose ranks share the tokens of its samples."""
    return SharedStep.open is not None


# -- tokens -----------------------------------------------------------------------------------------------------------


def part(tensor: Tensor, dim: int = 1, fill: float | None = None) -> Tensor:
    """Return this rank's part of what belongs to the tokens of a sequence: ids, labels (shifted
    already), positions. Call it in a step of a Task; from the first call on, its layers have parts.

    Args:
        tensor: of the whole sequence, equal on all ranks of a group.
        dim: of its tokens.
        fill: stands for tokens after the last one, so that the number of tokens is a multiple of
            twice the ranks; None refuses other numbers. Labels take one that counts in no loss.
            Causal attention does not see them from a token, other attention masks them.

    Raises:
        TaskError: the tokens cannot be cut evenly, or are not as many as those cut before.
    """
    step = SharedStep.open
    if step is None:
        return tensor
    step.cut(tensor.shape[dim], fills=fill is not None)
    return step.own(tensor, dim, fill or 0)


def whole_length(tokens: int) -> int:
    """Return the tokens of the whole sequence, of which this rank has `tokens`."""
    step = _step()
    if step is None:
        return tokens
    step.check(tokens)
    assert step.length is not None
    return step.length


def rows(table_PD: Tensor, tokens: int) -> Tensor:
    """Return the rows of a table of positions that belong to this rank's tokens: the first ones,
    if the sequence is whole.

    Args:
        table_PD: a row for each position, as many as the whole sequence has tokens, or more.
        tokens: of this rank.
    """
    step = _step()
    first = table_PD[: whole_length(tokens)]
    return first if step is None else step.own(first, 0)


# -- sums -------------------------------------------------------------------------------------------------------------


def sum_of_parts(values: Tensor) -> Tensor:
    """Return the sum over the ranks that share a sequence, equal on all of them. Its gradient on a
    rank is that of the rank's own tokens, since the engine sums gradients over these ranks too.
    """
    step = _step()
    if step is None:
        return values
    step.sums = True
    total: Tensor = _Sum.apply(values, step.group)
    return total


def mean_of_parts(values: Tensor) -> Tensor:
    """Return the mean over the ranks that share a sequence: that of a mean over tokens, if all of
    them count. Where some do not (padding, labels that are ignored), take `sum_of_parts` of the
    sum, and divide it by the count of the whole batch.

    Raises:
        TaskError: the sequence was filled up.
    """
    step = _step()
    if step is None:
        return values
    if step.size != step.length:
        raise TaskError(
            f"mean_of_parts has means of parts with other numbers of tokens: the {step.length} tokens"
            f" were filled up to {step.size}. Divide sum_of_parts(total) by the tokens that count."
        )
    return sum_of_parts(values) / step.group.ranks


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SampleRanks) -> Tensor:
        return group.sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# -- attention --------------------------------------------------------------------------------------------------------


def attention(
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    documents_BT: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return torch's scaled_dot_product_attention; of a part, with the keys and values of all ranks.

    Args:
        query_BHTK: of this rank's tokens, as for the next two.
        key_BHTK: with H or fewer heads, which divide H.
        value_BHTK: as many.
        mask: torch's, of a whole sequence alone.
        dropout: share of the weights that are dropped.
        causal: whether a token sees those up to itself alone.
        documents_BT: the number of the document of each token of the *whole* sequence, integers from
            0; a token sees those of its own document. It excludes `mask`.
        scale: torch's.

    Raises:
        TaskError: a part has a mask, or another number of tokens.
    """
    options: dict[str, Any] = {"scale": scale}
    if key_BHTK.shape[1] != query_BHTK.shape[1]:
        options["enable_gqa"] = True
    step = _step()
    if step is None:
        if documents_BT is not None:
            mask = same_document(documents_BT, documents_BT)
            if causal:
                mask = mask & mask.new_ones(mask.shape[-2:]).tril()
            causal = False
        return functional.scaled_dot_product_attention(
            query_BHTK, key_BHTK, value_BHTK, mask, dropout, causal, **options
        )
    if mask is not None:
        raise TaskError(
            f"engine.context is {step.group.ranks}, and attention has a mask, of which each rank"
            " would need other parts. Give causal=True and documents_BT in place of it, or set"
            " engine.context=1."
        )
    step.check(query_BHTK.shape[2])
    step.attends = True
    keys, values = _of_all_ranks(step.group, key_BHTK, value_BHTK)
    if documents_BT is not None:
        documents_BT = padded(documents_BT, 1, step.size, -1)
    options["dropout_p"] = dropout
    place = step.group.place, step.group.ranks
    if causal:
        return attend_before(place, query_BHTK, keys, values, documents_BT, **options)
    length = step.length or 0
    return attend_all(place, length, query_BHTK, keys, values, documents_BT, **options)


def _of_all_ranks(
    group: SampleRanks, key_BHTK: Tensor, value_BHTK: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values of the whole sequence: one message, and one in backward."""
    width = key_BHTK.shape[-1]
    both = _Gather.apply(torch.cat([key_BHTK, value_BHTK], -1), group)
    return both[..., :width], both[..., width:]


class _Gather(torch.autograd.Function):
    """The whole of what ranks have along the tokens; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, own_BHTK: Tensor, group: SampleRanks) -> Tensor:
        ctx.group = group
        return joined(group.gather(own_BHTK), 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        group: SampleRanks = ctx.group
        of_ranks = [part_of(gradient, 2, place, group.ranks) for place in range(group.ranks)]
        return group.scatter_sum(of_ranks), None
