"""packing.py: documents in rows, in any layout with the same labels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit.errors import ConfigError
from trainkit.extensions.language.packing import (
    IGNORED,
    Document,
    Layout,
    documents_of,
    lay_out,
    pack,
)


def document(*ids: int, silent: int = 0) -> Document:
    """Return a document whose first tokens are not predicted."""
    tokens = torch.tensor(ids)
    return Document(tokens, tokens.where(torch.arange(len(ids)) >= silent, IGNORED))


@given(st.lists(st.integers(1, 20), max_size=60))
def test_each_document_stands_in_one_row_that_holds_it(lengths: list[int]) -> None:
    """No row is longer than its size, and fewer than half of the rows are half empty or more."""
    rows = pack(lengths, 20)
    assert sorted(number for row in rows for number in row) == [*range(len(lengths))]
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert all(0 < size <= 20 for size in filled)
    assert sum(size <= 10 for size in filled) <= 1


def test_the_best_fit_is_taken() -> None:
    """A document takes the row with the least room that holds it: here no room is left."""
    assert pack([3, 5, 7, 2, 3], 10) == [[2, 0], [1, 4, 3]]


def test_a_document_longer_than_a_row_is_refused() -> None:
    """The one who calls cuts it, or leaves it out."""
    with pytest.raises(ConfigError, match="has 11 tokens, and a row holds 10"):
        pack([11], 10)


def test_positions_begin_again_at_each_document() -> None:
    """The padding counts as a document of its own, and the first token of each is not predicted."""
    samples = [[document(1, 2), document(3, 4, 5, silent=2)], [document(6, 7, 8)]]
    batch = lay_out(samples, "packed", pad=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]]
    none = IGNORED
    assert batch["labels"].tolist() == [[none, 2, none, none, 5], [none, 7, 8, none, none]]


def test_a_padded_batch_has_a_row_for_each_document() -> None:
    """What fills a row up is masked."""
    batch = lay_out([[document(1, 2), document(3, 4, 5)]], "padded", pad=9)
    assert batch["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 2, IGNORED], [IGNORED, 4, 5]]


@pytest.mark.parametrize("layout", ["packed", "padded", "flat"])
def test_all_layouts_have_the_same_labels(layout: Layout) -> None:
    """A batch weighs the same in each; a flat one is a single row."""
    samples = [[document(*range(1, 2 + i)), document(*range(3 * i + 2))] for i in range(4)]
    batch = lay_out(samples, layout, pad=0)
    labels = batch["labels"][batch["labels"] != IGNORED]
    assert labels.tolist() == [
        n for i in range(4) for n in [*range(2, 2 + i), *range(1, 3 * i + 2)]
    ]
    assert len(batch["labels"]) == {"packed": 4, "padded": 8, "flat": 1}[layout]


def test_documents_of_a_stream_are_apart() -> None:
    """Positions begin again after each end of a text, and the token after it has no label; a row's
    first place is 0, wherever its document began.
    """
    rows = torch.tensor([[5, 9, 7, 8, 9, 6], [9, 9, 1, 2, 3, 9]])
    positions, labels = documents_of(rows, end_of_text=9)
    assert positions.tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2]]
    assert labels.tolist() == [[9, IGNORED, 8, 9, IGNORED], [IGNORED, IGNORED, 2, 3, 9]]
