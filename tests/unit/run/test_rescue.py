"""Copies of buffers before a step, in memory that is used again."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.run.rescue import copies_of


def test_copies_are_those_of_the_step_in_the_same_memory():
    """Of each dtype and layout; a buffer that has another shape now gets memory of its own."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("grown", torch.zeros(2))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    first = copies_of(model, {})
    model[0].running_mean += 1
    model[0].num_batches_tracked += 1
    model.grown = torch.ones(5)
    second = copies_of(model, first)
    assert set(second) == {name for name, _ in model.named_buffers()}
    for name, buffer in model.named_buffers():
        assert torch.equal(second[name].to_dense(), buffer.to_dense()), name
    reused = {name for name in second if second[name] is first[name]}
    assert reused == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
