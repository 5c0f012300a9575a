"""Which replicas an elastic job can have (engine=fsdp engine.replicas=N)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from trainkit.engine.ranks import Ranks
from trainkit.errors import ConfigError
from trainkit.extensions.fsdp.replicas import ReplicaCollectives, take_rank
from trainkit.launch.environment import read_launcher


class OfJob(Ranks):
    """Ranks of a job of 8, at least 4; they count their joining."""

    is_elastic = True
    min_world_size, max_world_size, first_world_size = 4, 0, 8
    joined = 0

    def join(self, process_set: Any) -> None:
        """Count."""
        self.joined += 1


def assignment(replicas: int, tensor: int = 1, pipeline: int = 1, **limits: int) -> OfJob:
    """Take a rank."""
    ranks = type("Limited", (OfJob,), limits)(read_launcher())
    comm = cast(ReplicaCollectives, type("Alone", (), {"is_connected": False}))
    take_rank(ranks, comm, (replicas, tensor, pipeline))
    return cast(OfJob, ranks)


@pytest.mark.parametrize(("replicas", "size"), [(2, 4), (4, 2), (8, 1)])
def test_a_replica_has_the_ranks_of_the_start_divided_by_replicas(replicas: int, size: int) -> None:
    """Its number of ranks stays, however many replicas there are later."""
    ranks = assignment(replicas)
    assert (ranks.replica_size, ranks.joined) == (size, 1)


def test_with_copies_all_ranks_are_one_replica() -> None:
    """They are lost, and replaced, together."""
    ranks = assignment(1, copies=1, min_world_size=8)
    assert (ranks.replica_size, ranks.joined) == (8, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"replicas": 1},
            "engine.replicas is 1, and the job is elastic.*engine.replicas=2 or more",
        ),
        ({"replicas": 2, "pipeline": 2}, "engine.pipeline is 2.*cannot be replaced.*torchrun"),
        ({"replicas": 2, "context_size": 2}, "engine.context is 2.*cannot be replaced.*torchrun"),
        ({"replicas": 3}, "engine.replicas is 3, and there are 8 ranks"),
        (
            {"replicas": 2, "tensor": 3},
            "engine.replicas is 2 and engine.tensor is 3, and there are 8",
        ),
        (
            {"replicas": 2, "min_world_size": 6},
            r"--min-np is 6, and a replica has 4 ranks \(-np is 8, engine.replicas is 2\).*4 or 8",
        ),
        ({"replicas": 2, "min_world_size": 1}, "--min-np is 1, .* a multiple of 4, as 4\\."),
        ({"replicas": 4, "max_world_size": 9}, "--max-np is 9, and a replica has 2.*8 or 10"),
        ({"replicas": 2, "copies": 1}, "copies is 1, and engine.replicas is 2.*no effect"),
        (
            {"replicas": 1, "copies": 1, "min_world_size": 8, "max_world_size": 16},
            "--max-np is 16, and callbacks.elastic.copies is 1: the weights are in 8 parts",
        ),
        ({"replicas": 1, "copies": 1}, "--min-np is 4, and a replica has 8 ranks"),
    ],
)
def test_numbers_that_make_no_whole_replicas_are_refused(given: dict[str, int], said: str) -> None:
    """The message has the key, the value, and what is legal; no rank is asked for."""
    with pytest.raises(ConfigError, match=said):
        assignment(**given)
