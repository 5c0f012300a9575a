"""Training on some of the ranks: which ranks they are, and the place of each among them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A rank's place among those that take part."""

    ranks: tuple[int, ...]  # those that take part, as the launcher counts them, ascending
    takes_part: bool  # whether this rank is one of them
    rank: int  # this rank among them, from 0; the launcher's number if it is none of them
    local_rank: int  # this rank among those of its host, likewise
    local_size: int  # how many of its host take part


def check_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return engine.process_set in ascending order.

    Raises:
        ConfigError: it is empty, repeats a rank, or names one that was not started.
    """
    chosen = tuple(sorted(set(ranks)))
    if not chosen or len(chosen) != len(ranks) or chosen[0] < 0 or chosen[-1] >= world_size:
        raise ConfigError(
            f"engine.process_set is {list(ranks)}; it must list ranks from 0 to {world_size - 1}, each once, one at least "
            f"({world_size} {'was' if world_size == 1 else 'were'} started), or be null for all."
        )
    return chosen


def find_place(chosen: tuple[int, ...], rank: int, hosts: Sequence[int]) -> Place:
    """Return this rank's place.

    Args:
        chosen: what `check_ranks` returned.
        rank: this rank, as the launcher counts.
        hosts: for each rank of the launcher, a number that is its host's.
    """
    local = [other for other in chosen if hosts[other] == hosts[rank]]
    if rank not in chosen:
        return Place(chosen, False, rank, local_rank=0, local_size=len(local))
    return Place(chosen, True, chosen.index(rank), local.index(rank), len(local))
