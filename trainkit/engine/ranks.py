"""The place of this process among the ranks of a run. Imports no torch.

Ranks                           ranks that stay as the launcher started them
    horovod/elastic.ElasticRanks    ranks that an elastic driver assigns again while the process lives
"""

from __future__ import annotations

from trainkit.engine.process_set import Place
from trainkit.errors import EngineError
from trainkit.launch.environment import Launcher


class RanksChanged(EngineError):
    """The launcher has assigned other ranks to continue with; raised on all ranks at the same step."""


class Ranks:
    """Fixed ranks: those of the launcher, or of `engine.process_set`.

    Attributes:
        rank: this process among all, from 0. Until the engine was entered it is the launcher's number.
        world_size: number of processes.
        local_rank: this process among those of its host, from 0.
        local_size: number of processes on this host.
        takes_part: false on a rank outside `engine.process_set`: it enters the engine, trains nothing, and waits at the
            engine's exit until the ranks of the set are done.
        is_elastic: whether ranks may be assigned again while this process lives.
        joins_late: whether this process was started to join ranks that may be training already; they wait for it from the
            moment at which it enters the engine.
        committed_step: the newest step that this process can resume from in memory, -1 for none; an elastic driver makes the
            process with the newest one rank 0.
    """

    is_elastic = False
    joins_late = False
    committed_step = -1

    def __init__(self, launcher: Launcher) -> None:
        """Take the launcher's numbers."""
        self.assign(launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_size)

    def assign(self, rank: int, world_size: int, local_rank: int, local_size: int, *, takes_part: bool = True) -> None:
        """Set the numbers that hold from now on; see the attributes."""
        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_size = local_rank, local_size
        self.takes_part = takes_part

    def take(self, place: Place) -> None:
        """Count from now on among the ranks of a process set."""
        self.assign(place.rank, len(place.ranks), place.local_rank, place.local_size, takes_part=place.takes_part)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and prints."""
        return self.rank == 0 and self.takes_part

    @property
    def gpu_index(self) -> int:
        """This rank's GPU among those of its host."""
        return self.local_rank

    @property
    def first_world_size(self) -> int:
        """The number of ranks that the job was started with."""
        return self.world_size

    @property
    def max_world_size(self) -> int:
        """The largest number of ranks that the job can have while this process lives; 0 if nothing limits it."""
        return self.world_size

    @property
    def change_requested(self) -> bool:
        """Whether the launcher asks for ranks to be assigned again. Reads a local flag: cheap, and no message."""
        return False

    def begin(self, stage: str) -> None:
        """Announce what all ranks are about to run: "fit", "validate", "test" or "predict".

        Raises:
            ConfigError: the job is elastic, and a rank that joins later and starts the script from its top would not reach
                this stage together with the others.
        """

    def leave(self) -> None:
        """Close the connections, so that entering the engine again joins the ranks of that time. Call it outside the engine."""
