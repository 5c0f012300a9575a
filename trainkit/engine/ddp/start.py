"""The ranks of processes that torchrun, or anything that sets its variables, has started."""

from __future__ import annotations

import os

from trainkit.engine.ranks import Ranks
from trainkit.errors import EngineError
from trainkit.launch.environment import Launcher


def assign_ranks(ranks: Ranks, launcher: Launcher, engine: str) -> None:
    """Take the numbers of torchrun's variables.

    Args:
        engine: its name, for errors.

    Raises:
        EngineError: something else has started this process, or the variables are not set.
    """
    if launcher.name not in ("torchrun", "env"):
        if launcher.world_size > 1:
            raise EngineError(
                f"engine={engine}, but {launcher.name} started {launcher.world_size} processes without torchrun's "
                "variables. Use torchrun, or engine=auto."
            )
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise EngineError(
                f"engine={engine} needs a launcher (not set: {', '.join(missing)}). Start with `torchrun --nproc-per-node 2 "
                "-m trainkit fit ...`, or use engine=auto."
            )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = os.environ.get("LOCAL_WORLD_SIZE", str(world_size if "LOCAL_RANK" in os.environ else 1))
    ranks.assign(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), int(local_size))
