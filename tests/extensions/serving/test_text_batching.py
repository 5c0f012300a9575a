"""TextBatcher: an answer that cannot be drawn is its own request's failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.extensions.serving.letters import Letters
from trainkit.errors import TaskError
from trainkit.extensions.language.sampling import Answer, Ask, begin, continue_all, pieces_of
from trainkit.extensions.serving.text_batching import TextBatcher


def next_letter(ids: list[int]) -> Tensor:
    """Return the logits of the letter after the last one; NaN after "z"."""
    logits = torch.full((128,), -torch.inf)
    logits[(ids[-1] + 1) % 128] = torch.nan if ids[-1] == ord("z") else 0.0
    return logits


async def ask(batcher: TextBatcher, *prompts: str) -> str:
    """Return the texts of a request, one after the other."""
    answers = [begin(batcher._source, Ask(prompt, 3)) for prompt in prompts]
    texts = [""] * len(prompts)
    async for piece in batcher.pieces(answers):
        texts[piece.place] += piece.text
    return " ".join(texts)


def together(can_batch: bool) -> tuple[TextBatcher, list[Any]]:
    """Ask three requests of one batch, of which the second meets NaN at its second token."""
    source = Letters(next_letter)
    source.can_batch = can_batch

    async def talk() -> tuple[TextBatcher, list[Any]]:
        batcher = TextBatcher(source, 8, 0, 8)
        asked = [ask(batcher, "a"), ask(batcher, "b", "y"), ask(batcher, "k")]
        made = asyncio.gather(*asked, return_exceptions=True)
        return batcher, await asyncio.wait_for(made, 20)

    return asyncio.run(talk())


@pytest.mark.parametrize("can_batch", [True, False])
def test_an_answer_that_cannot_be_drawn_leaves_its_neighbours(can_batch: bool) -> None:
    """They are made to their ends; its request has the error."""
    batcher, (first, broken, last) = together(can_batch)
    assert (first, last) == ("bcd", "lmn") and batcher.num_batches == 1
    assert isinstance(broken, TaskError) and "logits of the next token are NaN or Inf" in str(
        broken
    )


def test_without_a_receiver_the_error_is_raised() -> None:
    """In a command or a callback there is no one else to answer."""
    with pytest.raises(TaskError, match="none can be drawn"):
        list(pieces_of(Letters(next_letter), Ask("z", 3)))


def test_a_failed_answer_has_ended() -> None:
    """With "error"; its pieces before stay."""
    source, failures = Letters(next_letter), list[Answer]()
    one = begin(source, Ask("y", 3))
    made = list(continue_all(source, [one], lambda answer, _: failures.append(answer)))
    assert made == [(one, "z")] and failures == [one] and one.finish == "error"
