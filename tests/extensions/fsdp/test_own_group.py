"""A group of ranks that torch.distributed does not know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainkit.extensions.fsdp.own_group import OwnGroup


def on_ranks(size: int, work: Callable[[OwnGroup], Any]) -> list[Any]:
    """Return what ranks return, each a thread."""
    store, results = dist.HashStore(), dict[int, Any]()

    def rank(number: int) -> None:
        results[number] = work(OwnGroup("some", store, number, size, on_gpu=False))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[number] for number in range(size)]


def test_tensors_are_summed_and_sent() -> None:
    """The sum is in place; a broadcast is the first rank's, and none starts torch's own groups."""

    def work(group: OwnGroup) -> Any:
        total, sent = torch.tensor([group.rank + 1.0]), torch.tensor([group.rank + 5])
        group.start_sum(total).wait()
        group.start_broadcast(sent).wait()
        group.barrier()
        return (
            total.item(),
            sent.item(),
            [one.item() for one in group.gather(torch.tensor(group.rank))],
        )

    assert on_ranks(3, work) == [(6.0, 5, [0, 1, 2])] * 3
    assert not dist.is_initialized()


def test_objects_of_any_size_are_sent() -> None:
    """Each rank's value comes as it is, though they are of different lengths."""

    def work(group: OwnGroup) -> Any:
        own = {"rank": group.rank, "text": "x" * (1000 * group.rank)}
        return group.broadcast_object(own), [len(one["text"]) for one in group.gather_objects(own)]

    assert on_ranks(2, work) == [({"rank": 0, "text": ""}, [0, 1000])] * 2
