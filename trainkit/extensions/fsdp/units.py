"""FSDP2's units in a Task: the modules whose weights are gathered one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainkit.engine.collectives import PeerError
from trainkit.engine.ddp.collectives import blames_peer
from trainkit.engine.ranks import Ranks


def units_of(task: nn.Module) -> Iterator[FSDPModule]:
    """Yield each."""
    yield from (module for module in task.modules() if isinstance(module, FSDPModule))


def set_up_units(task: nn.Module) -> None:
    """Let units sum gradients as they are, and have the names of the user's classes."""
    for module in units_of(task):
        # made by fully_shard: FSDPModule, then the user's class; messages show its name
        kind = type(module)
        kind.__name__ = kind.__mro__[2].__name__
        kind.__qualname__ = kind.__mro__[2].__qualname__
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # from torch 2.14; before, ranks must use the same
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)


def reshard(units: Iterable[FSDPModule]) -> None:
    """Drop gathered weights: they are copies of parts that are about to change."""
    for unit in units:
        unit.reshard()


def resharding(call: Callable[..., Any], units: Sequence[FSDPModule]) -> Callable[..., Any]:
    """Return a call after which no weights are gathered: callbacks may change parts, as averages
    do.
    """

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            reshard(units)

    return called


def reporting_peers(call: Callable[..., Any], ranks: Ranks) -> Callable[..., Any]:
    """Return a call in which the error of a collective is a PeerError: its cause is reported by the
    rank that is gone. It ends this rank's replica, too: FSDP2 cannot leave a forward or a backward
    in its midst, and be used again.
    """

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except PeerError:
            ranks.lose_replica()
            raise
        except RuntimeError as error:
            if blames_peer(error):
                ranks.lose_replica()
                raise PeerError(f"Another rank ended: {error}") from error
            raise

    return called
