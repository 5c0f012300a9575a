"""Documents of unequal length as batches: which share a row, and how a batch lays them out.

pack        which documents stand in which row
packed      a row for each pack; positions begin again at each document, which keeps them apart
padded      a row for each document, filled up to the longest
flat        all documents in one row, for kernels of variable lengths (flash attention)

All three layouts have the same labels, so that a step's loss and gradient are the same.

documents_of    the documents of rows that were cut out of a stream of tokens, by the token between them
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainkit.errors import ConfigError

# arguments of models of transformers for flash attention, in this order
VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
IGNORED = -100  # a label that counts in no loss
Layout = Literal["packed", "padded", "flat"]


class Document(NamedTuple):
    """A text in tokens.

    Attributes:
        ids: token numbers, int64 [T].
        labels: the same where the token is to be predicted, IGNORED elsewhere; int64 [T].
    """

    ids: Tensor
    labels: Tensor


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return the documents of each row: best fit, the longest first (Johnson 1974), in
    O(n log size).

    They are a function of the lengths alone, so all ranks of all runs have the same.

    Args:
        lengths: tokens of each document, from 1 to `size`.
        size: tokens of a row at most.

    Raises:
        ConfigError: a document is longer than a row.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> rows
    rooms: list[int] = []  # the keys of with_room, rising
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[document]
        if length > size:
            raise ConfigError(f"A document has {length} tokens, and a row holds {size}.")
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            room = size
            row = len(rows)
            rows.append([])
        rows[row].append(document)
        if left := room - length:
            if left not in with_room:
                bisect.insort(rooms, left)
                with_room[left] = []
            with_room[left].append(row)
    return rows


def lay_out(samples: Sequence[Sequence[Document]], layout: Layout, pad: int) -> dict[str, Any]:
    """Return a batch of samples, each of which is a pack of documents.

    Args:
        samples: of a microbatch; each has a document or more.
        layout: see the module.
        pad: the number of the token that fills rows up.

    Returns:
        input_ids and labels [B, T]; with "packed" and "flat" position_ids [B, T], with "padded"
        attention_mask [B, T]; with "flat" VARLEN too. A document's first token has the label
        IGNORED: no other text predicts it.
    """
    if layout == "padded":
        return _padded([document for sample in samples for document in sample], pad)
    rows = samples if layout == "packed" else [[doc for sample in samples for doc in sample]]
    ids = [torch.cat([document.ids for document in row]) for row in rows]
    labels = [torch.cat([_without_first(document) for document in row]) for row in rows]
    longest = max(len(row) for row in ids)
    lengths = [[len(document.ids) for document in row] for row in rows]
    batch: dict[str, Any] = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "position_ids": torch.stack([_positions(row, longest) for row in lengths]),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }
    return batch | _varlen(lengths[0]) if layout == "flat" else batch


def documents_of(tokens_BT: Tensor, end_of_text: int) -> tuple[Tensor, Tensor]:
    """Return positions and labels that keep the documents of rows apart, as "packed" does.

    A row begins and ends anywhere in a document. Nothing here waits for the device.

    Args:
        tokens_BT: rows of a stream, of one token more than the model reads.
        end_of_text: the last token of each document.

    Returns:
        position_ids [B, T - 1], which begin again after each end of a text; labels [B, T - 1], the
        token after each, IGNORED after an end of a text: no other text predicts the first one.
    """
    is_end_BT = tokens_BT[:, :-1] == end_of_text
    places_T = torch.arange(is_end_BT.shape[1], device=tokens_BT.device)
    begins_BT = torch.where(is_end_BT, places_T + 1, 0).cummax(1).values
    begins_BT = torch.nn.functional.pad(begins_BT[:, :-1], (1, 0))
    return places_T - begins_BT, tokens_BT[:, 1:].masked_fill(is_end_BT, IGNORED)


def _varlen(lengths: Sequence[int]) -> dict[str, Any]:
    """Return what flash attention's kernels read of a row's documents: their borders, int32, and the
    longest. Each layer of a model would ask the device for them otherwise.
    """
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return dict(zip(VARLEN, (borders, borders, longest, longest), strict=True))


def _padded(documents: Sequence[Document], pad: int) -> dict[str, Tensor]:
    ids = [document.ids for document in documents]
    ids_BT = pad_sequence(ids, batch_first=True, padding_value=pad)
    lengths_B1 = torch.tensor([[len(document)] for document in ids])
    labels = [_without_first(document) for document in documents]
    return {
        "input_ids": ids_BT,
        "attention_mask": (torch.arange(ids_BT.shape[1]) < lengths_B1).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def _positions(lengths: Sequence[int], size: int) -> Tensor:
    """Return positions [size] that begin again at each document; the padding is one more."""
    rest = size - sum(lengths)
    return torch.cat([torch.arange(length) for length in (*lengths, rest)])


def _without_first(document: Document) -> Tensor:
    labels = document.labels.clone()
    labels[0] = IGNORED
    return labels
