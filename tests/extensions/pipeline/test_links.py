"""What a stage can hand on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainkit.engine.collectives import LocalCollectives
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.ranks import Ranks
from trainkit.errors import TaskError
from trainkit.extensions.pipeline.links import Links, StageGroup
from trainkit.extensions.pipeline.schedule import StageSchedule
from trainkit.launch.environment import read_launcher


@pytest.mark.parametrize(
    ("send", "text"),
    [
        (
            lambda links: links.request(1, range(17)),
            "pipeline stage 1 takes 17 tensors of the stage before it; there can be 16. Conc",
        ),
        (
            lambda links: links.send(0, [torch.ones(2), torch.ones((1,) * 9)]),
            r"stage 0 hands on a tensor of shape \[1, .*\]; it can have 8 dimensions. Concatenate",
        ),
    ],
    ids=["tensors", "dimensions"],
)
def test_more_than_a_header_holds_is_refused(send: Callable[[Links], object], text: str) -> None:
    """Before anything is sent, with the number and what to do."""
    ranks = Ranks(read_launcher())
    comm = LocalCollectives(ranks, Heartbeat())
    links = Links(
        StageGroup([1, 0], [], []), 0, StageSchedule("1f1b", 2), torch.device("cpu"), comm
    )
    with pytest.raises(TaskError, match=text):
        send(links)
