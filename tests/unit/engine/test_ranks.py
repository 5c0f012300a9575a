"""The place of a rank among those that train."""

from __future__ import annotations

import pytest

from trainkit.engine.ranks import Ranks, check_ranks
from trainkit.errors import ConfigError
from trainkit.extensions.fsdp.layouts import check_groups
from trainkit.launch.environment import Launcher


@pytest.mark.parametrize(
    ("rank", "takes_part", "place", "local"),
    [(0, False, 0, (0, 1)), (1, True, 0, (0, 1)), (2, True, 1, (0, 2)), (3, True, 2, (1, 2))],
)
def test_ranks_of_the_set_are_renumbered(
    rank: int, takes_part: bool, place: int, local: tuple[int, int]
) -> None:
    """Of two hosts with two ranks each, ranks 1, 2, 3 train:
    each host's first of them has local rank 0.
    """
    ranks = Ranks(Launcher("torchrun", rank, 4, rank % 2, 2))
    ranks.narrow((1, 2, 3), hosts=[0, 0, 2, 2])
    assert (ranks.takes_part, ranks.rank, (ranks.local_rank, ranks.local_size)) == (
        takes_part,
        place,
        local,
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [],
            (
                r"engine\.process_set is \[\]; it must list ranks from 0 to 2, each once, one at"
                r" least \(3 were started\)"
            ),
        ),
        ([0, 0], r"engine\.process_set is \[0, 0\]; it must list ranks from 0 to 2, each once"),
        ([1, 3], r"engine\.process_set is \[1, 3\]; it must list ranks from 0 to 2"),
        ([-1], r"engine\.process_set is \[-1\]; it must list ranks from 0 to 2"),
    ],
)
def test_a_set_that_cannot_be_is_refused(ranks: list[int], words: str) -> None:
    """Empty sets, repeated ranks and ranks that were not started are refused."""
    assert check_ranks([2, 0], 3) == (0, 2)
    with pytest.raises(ConfigError, match=words):
        check_ranks(ranks, 3)


@pytest.mark.parametrize(
    ("rank", "data_rank", "counts"), [(0, 0, True), (1, 0, False), (4, 2, True), (5, 2, False)]
)
def test_a_tensor_group_is_one_data_rank(rank: int, data_rank: int, counts: bool) -> None:
    """Of six ranks in groups of two, neighbours read the same samples,
    and the first of them counts.
    """
    ranks = Ranks(Launcher("torchrun", rank, 6, rank, 6))
    assert (ranks.data_rank, ranks.data_size, ranks.counts_samples) == (rank, 6, True)
    ranks.tensor_size = 2
    assert (ranks.data_rank, ranks.data_size, ranks.counts_samples) == (data_rank, 3, counts)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    """The message names what was set."""
    check_groups(8, 2, 4)
    with pytest.raises(
        ConfigError, match=r"^engine\.tensor is 3, and there are 8 ranks; it must divide them"
    ):
        check_groups(8, 1, 3)
    with pytest.raises(
        ConfigError,
        match=(
            r"engine\.replicas is 2 and engine\.tensor is 3, .*; their product, 6, must divide them"
        ),
    ):
        check_groups(8, 2, 3)
