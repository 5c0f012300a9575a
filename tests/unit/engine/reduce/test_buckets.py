"""Which parameters travel together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainkit.engine.reduce.buckets import NamedParameter, by_name, by_number, by_size, find_sparse
from trainkit.errors import ConfigError


def layers(*double: int) -> list[NamedParameter]:
    """Five parameters of 400 bytes in float32, named a.0, a.1, b.2, ...;
    those of `double` are of float64.
    """
    names = ["a.0", "a.1", "b.2", "b.3", "b.4"]
    dtypes = [torch.float64 if i in double else torch.float32 for i in range(5)]
    return [
        (name, nn.Parameter(torch.zeros(100, dtype=dtype)))
        for name, dtype in zip(names, dtypes, strict=True)
    ]


def names(buckets: list[list[NamedParameter]]) -> list[list[str]]:
    """The names of each bucket."""
    return [[name for name, _ in bucket] for bucket in buckets]


def test_buckets_hold_each_parameter_once_from_the_last_to_the_first() -> None:
    """Buckets keep to their size and to one dtype; a sparse one stays alone."""
    assert names(by_size(layers(2), 800)) == [["b.4", "b.3"], ["b.2"], ["a.1", "a.0"]]
    trained = layers()
    assert names(by_size(trained, 10**6, {trained[2][1]})) == [
        ["b.4", "b.3"],
        ["b.2"],
        ["a.1", "a.0"],
    ]


def test_groups_by_number_are_of_equal_length() -> None:
    """Within one; a group of two dtypes is split, and sparse ones stay alone."""
    assert names(by_number(layers(), 2)) == [["b.4", "b.3", "b.2"], ["a.1", "a.0"]]
    assert names(by_number(layers(3), 2)) == [["b.4", "b.2"], ["b.3"], ["a.1", "a.0"]]
    trained = layers()
    assert names(by_number(trained, 2, {trained[4][1]})) == [
        ["b.3", "b.2"],
        ["a.1", "a.0"],
        ["b.4"],
    ]


def test_groups_by_name_take_parameters_and_modules() -> None:
    """A module's name selects all of its parameters;
    a parameter that is not named is a group of its own.
    """
    assert names(by_name(layers(), [["b"], ["a.0"]])) == [["b.4", "b.3", "b.2"], ["a.0"], ["a.1"]]
    assert names(by_name(layers(), [])) == [["b.4"], ["b.3"], ["b.2"], ["a.1"], ["a.0"]]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [["a.5"]],
            (
                r"engine\.groups names 'a\.5', which is no trained parameter and no module.*Did you"
                r" mean 'a\.\d'\?"
            ),
        ),
        ([["a"], ["a.1"]], r"engine\.groups has 'a\.1' in two groups"),
        (
            [["b"]],
            (
                r"engine\.groups has 'b\.2', whose sparse gradient .* or set"
                r" engine\.sparse_as_dense=true"
            ),
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: list[list[str]], words: str) -> None:
    """Unknown names, names in two groups, and sparse embeddings are refused."""
    trained = layers()
    with pytest.raises(ConfigError, match=words):
        by_name(trained, groups, {trained[2][1]})


def test_more_groups_than_parameters_are_refused() -> None:
    """No group stays empty."""
    with pytest.raises(
        ConfigError, match=r"engine\.num_groups is 6, but the model has 5 trained parameters"
    ):
        by_number(layers(), 6)


def test_sparse_gradients_are_known_before_the_first_step() -> None:
    """Sparse embeddings are found by their module, other parameters by SparseAdam."""
    sparse = [nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True)]
    model = nn.ModuleList([*sparse, nn.Embedding(3, 2), nn.Linear(2, 2, bias=False)])
    a, b, _, d = model.parameters()
    assert find_sparse(model, []) == {a, b}
    assert find_sparse(model, [torch.optim.SparseAdam([d])]) == {a, b, d}


def test_to_look_for_sparse_weights_computes_none() -> None:
    """A layer under spectral_norm moves its vectors each time that its weight is read."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)))
    before = [buffer.clone() for buffer in model.buffers()]
    assert before and find_sparse(model, []) == set()
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
