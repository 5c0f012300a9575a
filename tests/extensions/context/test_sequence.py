"""What a Task and its layers call, of one rank of a group and without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.extensions.context.ranks_beside import Beside, opened
from trainkit.errors import TaskError
from trainkit.extensions.context.parts import part_of
from trainkit.extensions.context.sequence import (
    attention,
    is_shared,
    mean_of_parts,
    part,
    rows,
    sum_of_parts,
    whole_length,
)

TOKENS, RANKS = 8, 2


def heads(seed: int, width: int = 4) -> Tensor:
    """Of a whole sequence, that gradients reach."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randn(2, 2, TOKENS, width, generator=draw, dtype=torch.float64)
    return made.requires_grad_()


def test_one_process_does_what_torch_does() -> None:
    """The same tensors, and the same bits."""
    query, key, value = heads(1), heads(2), heads(3)
    assert not is_shared()
    assert part(query, 2) is query
    assert sum_of_parts(query) is query
    assert mean_of_parts(query) is query
    assert whole_length(5) == 5
    assert rows(query[0, 0], 3).data_ptr() == query.data_ptr()
    for causal in (True, False):
        own = attention(query, key, value, None, 0.0, causal)
        assert torch.equal(
            own, functional.scaled_dot_product_attention(query, key, value, None, 0.0, causal)
        )


def test_documents_of_one_process_stay_apart() -> None:
    """As each alone."""
    query, key, value = heads(1), heads(2), heads(3)
    documents = torch.tensor([[0] * 3 + [1] * 5] * 2)
    together = attention(query, key, value, causal=True, documents_BT=documents)
    for begin, end in ((0, 3), (3, 8)):
        own = [each[:, :, begin:end] for each in (query, key, value)]
        alone = functional.scaled_dot_product_attention(*own, is_causal=True)
        torch.testing.assert_close(together[:, :, begin:end], alone, rtol=0, atol=1e-15)


def test_outputs_and_gradients_are_those_of_the_whole() -> None:
    """Keys and values of other width, whose gradients the ranks return to one another."""
    query, key, value = heads(1), heads(2), heads(3, width=6)
    expected = attention(query, key, value, causal=True)
    slope = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * slope).sum(), [query, key, value])
    both = torch.cat([key, value], -1).detach()
    returned = []
    for place in range(RANKS):
        group = Beside(place, RANKS, both)
        with opened(group):
            part(torch.empty(1, TOKENS))
            own = [part_of(each, 2, place, RANKS) for each in (query, key, value)]
            outputs = attention(*own, causal=True)
        mine = part_of(expected, 2, place, RANKS)
        torch.testing.assert_close(outputs, mine, rtol=0, atol=1e-15)
        (of_query,) = torch.autograd.grad(
            (outputs * part_of(slope, 2, place, RANKS)).sum(), own[:1], retain_graph=True
        )
        mine = part_of(wanted[0], 2, place, RANKS)
        torch.testing.assert_close(of_query, mine, rtol=0, atol=1e-15)
        (outputs * part_of(slope, 2, place, RANKS)).sum().backward()
        returned.append(group.returned)
    for place in range(RANKS):
        summed = sum(each[place] for each in returned)
        mine = part_of(torch.cat(wanted[1:], -1), 2, place, RANKS)
        torch.testing.assert_close(summed, mine, rtol=0, atol=1e-15)


def test_a_sum_has_the_gradient_of_its_own_tokens() -> None:
    """It is one process's together with that of the other ranks."""
    own = torch.ones(3, requires_grad=True)
    with opened(Beside(1, RANKS)):
        part(torch.empty(1, TOKENS))
        total, mean = sum_of_parts(own.sum()), mean_of_parts(own.sum())
    assert (total.item(), mean.item()) == (6.0, 3.0)
    assert torch.autograd.grad(total, own)[0].tolist() == [1.0, 1.0, 1.0]
    assert torch.autograd.grad(mean, own)[0].tolist() == [0.5, 0.5, 0.5]


def test_tokens_and_rows_of_a_part() -> None:
    """The first and the last chunk of this rank; what is missing is filled up, at the end."""
    with opened(Beside(0, RANKS)):
        assert part(torch.arange(6), 0, fill=-1).tolist() == [0, 1, -1, -1]
        assert whole_length(4) == 6
        assert rows(torch.arange(100)[:, None], 4).flatten().tolist() == [0, 1, 0, 0]
    with opened(Beside(1, RANKS)):
        assert part(torch.arange(6)[None], fill=-1).tolist() == [[2, 3, 4, 5]]
        assert rows(torch.arange(100)[:, None], 4).flatten().tolist() == [2, 3, 4, 5]


def test_a_step_is_whole_until_it_takes_its_part() -> None:
    """Its layers too."""
    with opened(Beside(0, RANKS)):
        assert is_shared()
        assert whole_length(5) == 5
        query = heads(1)
        expected = functional.scaled_dot_product_attention(query, query, query)
        assert torch.equal(attention(query, query, query), expected)


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_random_numbers_continue_after_a_step(name: str) -> None:
    """As if a training step had drawn one, and a validation none; within a training step they are
    each rank's own from the cut on.
    """

    def draws(place: int) -> tuple[float, float, float]:
        torch.manual_seed(4)
        with opened(Beside(place, RANKS), name):
            before = float(torch.rand(()))
            part(torch.empty(1, TOKENS))
            within = float(torch.rand(()))
        return before, within, float(torch.rand(()))

    first, second = draws(0), draws(1)
    assert first[0] == second[0]
    assert first[2] == second[2]
    assert (first[1] == second[1]) == (name == "validation_step")


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("odd", r"a sequence of 6 tokens, which cannot be cut into 4 chunks .* have 8 tokens"),
        ("unlike", "a sequence of 9 tokens after one of 8"),
        ("whole layer", "a layer has 8 tokens where training_step has taken its part, 4 tokens"),
        ("mask", r"attention has a mask.*Give causal=True and documents_BT"),
        ("mean", "the 6 tokens were filled up to 8"),
    ],
)
def test_what_cannot_be_a_part_is_refused(case: str, text: str) -> None:
    """With the numbers, and what to do."""
    query = heads(1)
    tokens = torch.empty(1, TOKENS)
    with (
        opened(Beside(0, RANKS)),
        pytest.raises(TaskError, match=text),
    ):
        if case == "odd":
            part(tokens[:, :6])
        if case == "mean":
            part(tokens[:, :6], fill=0)
            mean_of_parts(query.sum())
        part(tokens)
        if case == "unlike":
            part(torch.empty(1, 9), fill=-100)
        if case == "whole layer":
            attention(query, query, query)
        attention(query, query, query, mask=torch.ones(1, dtype=torch.bool))
