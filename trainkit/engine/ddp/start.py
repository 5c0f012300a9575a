"""The ranks of processes that torchrun, srun,
or anything that sets torchrun's variables, has started.
"""

from __future__ import annotations

import os

from trainkit.engine.ranks import Ranks
from trainkit.errors import EngineError
from trainkit.launch.environment import Launcher, read_launcher
from trainkit.launch.slurm.step import this_step


def assign_ranks(ranks: Ranks, launcher: Launcher, engine: str) -> None:
    """Take the numbers of torchrun's variables; under srun, set them first, for torch reads them
    too.

    Args:
        engine: its name, for errors.

    Raises:
        EngineError: something else has started this process, the variables are not set, or srun's
            do not suffice.
    """
    if launcher.name == "srun":
        if read_launcher().name == "srun":  # not set by an earlier fit of this process
            os.environ |= this_step().torch_variables()
    elif launcher.name not in ("torchrun", "env") and launcher.world_size > 1:
        raise EngineError(
            f"engine={engine}, but {launcher.name} started {launcher.world_size} processes"
            " without torchrun's variables. Use torchrun, or engine=auto."
        )
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise EngineError(
            f"engine={engine} needs a launcher (not set: {', '.join(missing)}). Start with"
            " `torchrun --nproc-per-node 2 -m trainkit ...`, or use engine=auto, in an"
            " environment without a launcher's variables."
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = os.environ.get(
        "LOCAL_WORLD_SIZE", str(world_size if "LOCAL_RANK" in os.environ else 1)
    )
    ranks.assign(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), int(local_size))
