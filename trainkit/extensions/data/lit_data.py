"""LitData: its data sets take the part that they read from variables, when they are made."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from trainkit.data.streams import Sharded
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError


def read(data: Any, name: str, engine: Engine) -> Any:
    """Return the data, unless it would read another part than this rank should. Call it on all
    ranks.

    Raises:
        ConfigError: it would on one of them.
    """
    is_own = isinstance(data, Sharded)
    parts = _parts_by_variables(data.data if is_own else data)
    if not parts:
        return data
    ranks = engine.ranks
    right = {(ranks.data_rank, ranks.data_size) if is_own else (0, 1)}
    wrong = engine.comm.all_gather_object(sorted(parts - right))
    if any(wrong):
        rank, size = next(part for of_rank in wrong for part in of_rank)
        raise ConfigError(
            f"{name}: LitData took a rank for rank {rank} of {size}, by WORLD_SIZE and"
            " GLOBAL_RANK: samples would be left out, or come several times. Before its data"
            " set is made, on each rank: os.environ.update(WORLD_SIZE=str(trainkit.world_size()),"
            " GLOBAL_RANK=str(trainkit.rank())). Then each reads its own part: pass"
            " trainkit.sharded(loader)."
        )
    return data


def _parts_by_variables(data: Any) -> set[tuple[int, int]]:
    """Return (rank, number of ranks) of the parts that LitData's sets of a loader read: taken from
    WORLD_SIZE and GLOBAL_RANK when they were made.
    """
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    several = [dataset, *getattr(dataset, "_datasets", ())]
    seen = [one.distributed_env for one in several if hasattr(one, "distributed_env")]
    return {(env.global_rank, env.world_size) for env in seen}
