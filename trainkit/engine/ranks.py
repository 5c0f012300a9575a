"""The place of this process among the ranks of a run. Imports no torch.

Ranks       ranks that stay as the launcher started them
ranks_of    those of this process: an extension may bring ranks that are assigned again while the
            process lives
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainkit.console import info
from trainkit.errors import ConfigError, EngineError
from trainkit.extension import extensions, resolve
from trainkit.launch.environment import Launcher, own_gpu

if TYPE_CHECKING:
    from trainkit.engine.heartbeat import Watcher


class RanksChanged(EngineError):
    """The launcher has assigned other ranks to continue with;
    raised on all ranks at the same step.
    """


class Ranks:
    """Fixed ranks: those of the launcher, or of `engine.process_set`.

    Attributes:
        rank: this process among all, from 0. Until the engine was entered it is the launcher's
            number.
        world_size: number of processes.
        local_rank: this process among those of its host, from 0.
        local_size: number of processes on this host.
        takes_part: false on a rank outside `engine.process_set`: it enters the engine, trains
            nothing, and waits at the engine's exit until the ranks of the set are done.
        is_elastic: whether ranks may be assigned again while this process lives.
        joins_late: whether this process was started to join ranks that may be training already;
            they wait for it from the moment at which it enters the engine.
        tensor_size: ranks that share the widths of layers (FSDPEngine's `tensor`).
        pipeline_size: stages that share the layers (FSDPEngine's `pipeline`).
        context_size: ranks that share the tokens of each sample (FSDPEngine's `context`).
        replica_size: ranks of an elastic job that hold the weights together, and so are lost and
            replaced together (FSDPEngine's `replicas`).
        copies: hosts whose memory holds a copy of each rank's state (callbacks.elastic.copies), so that
            all ranks may be replaced together.
        committed_step: the newest step that this process can resume from in memory, -1 for none; an
            elastic driver makes the process with the newest one rank 0.
        watcher: how a launcher watches this process; None if it does not.
    """

    is_elastic = False
    joins_late = False
    tensor_size = 1
    pipeline_size = 1
    context_size = 1
    replica_size = 1
    committed_step = -1

    @property
    def copies(self) -> int:
        """See the attributes."""
        return 0

    watcher: Watcher | None = None

    def __init__(self, launcher: Launcher) -> None:
        """Take the launcher's numbers."""
        self.assign(launcher.rank, launcher.world_size, launcher.local_rank, launcher.local_size)

    def assign(
        self,
        rank: int,
        world_size: int,
        local_rank: int,
        local_size: int,
        *,
        takes_part: bool = True,
    ) -> None:
        """Set the numbers that hold from now on; see the attributes."""
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.local_size = local_size
        self.takes_part = takes_part

    def join(self, process_set: Sequence[int] | None) -> None:
        """Take the ranks of from now on, before the framework starts; `process_set` is the
        engine's.

        Raises:
            ConfigError: the job is elastic, and there is a process set, or no way to the others.
        """

    def narrow(self, chosen: tuple[int, ...], hosts: Sequence[int]) -> None:
        """Count from now on among the ranks of a process set; a rank outside of it keeps its
        number.

        Args:
            chosen: what `check_ranks` returned.
            hosts: for each rank of the launcher, a number that is its host's.
        """
        local = [other for other in chosen if hosts[other] == hosts[self.rank]]
        if self.rank in chosen:
            self.assign(chosen.index(self.rank), len(chosen), local.index(self.rank), len(local))
        else:
            self.assign(self.rank, len(chosen), 0, len(local), takes_part=False)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and prints."""
        return self.rank == 0 and self.takes_part

    def say(self, text: str) -> None:
        """Report on rank 0 what happens."""
        if self.is_main:
            info(text)

    @property
    def model_size(self) -> int:
        """Ranks that compute one model from the same samples, its layers, their widths and the
        tokens among them: r x model_size to (r + 1) x model_size - 1 for each r.
        """
        return self.tensor_size * self.context_size * self.pipeline_size

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank, from 0. The last stage, which has the loss, is that of
        the first ranks of a model: rank 0 logs it.
        """
        ranks_of_stage = self.model_size // self.pipeline_size
        return self.pipeline_size - 1 - self.rank % self.model_size // ranks_of_stage

    @property
    def groups(self) -> str:
        """How ranks are grouped: "2 data x 2 pipeline x 2 tensor"; "" if each has its own model."""
        sizes = {
            "pipeline": self.pipeline_size,
            "context": self.context_size,
            "tensor": self.tensor_size,
        }
        shown = [f"{size} {name}" for name, size in sizes.items() if size > 1]
        return " x ".join([f"{self.data_size} data", *shown]) if shown else ""

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different samples;
        the same on all ranks of one model.
        """
        return self.rank // self.model_size

    @property
    def data_size(self) -> int:
        """The number of ranks that read different samples:
        what the batch of a step, and the contract, count.
        """
        return self.world_size // self.model_size

    @property
    def counts_samples(self) -> bool:
        """Whether this rank's samples and values count: those of one rank of each model."""
        return self.rank % self.model_size == 0

    @property
    def gpu_index(self) -> int:
        """This rank's GPU among those that it sees:
        all of its host, unless the launcher shows each rank its own alone.
        """
        own = own_gpu()
        return self.local_rank if own is None else own

    @property
    def first_world_size(self) -> int:
        """The number of ranks that the job was started with."""
        return self.world_size

    @property
    def max_world_size(self) -> int:
        """The largest number of ranks that the job can have while this process lives;
        0 if nothing limits it.
        """
        return self.world_size

    @property
    def min_world_size(self) -> int:
        """The smallest number of ranks with which the job continues while this process lives."""
        return self.world_size

    def lose_replica(self) -> None:
        """Note that ranks which hold parts of this rank's weights are gone: an elastic driver
        replaces this rank too.
        """

    @property
    def change_requested(self) -> bool:
        """Whether the launcher asks for ranks to be assigned again.
        Reads a local flag: cheap, and no message.
        """
        return False

    def begin(self, stage: str) -> None:
        """Announce what all ranks are about to run: "fit", "validate", "test" or "predict".

        Raises:
            ConfigError: the job is elastic, and a rank that joins later and starts the script from
                its top would not reach this stage together with the others.
        """

    def report_exception(self) -> None:
        """Let the launcher know that the code which this rank runs has raised an exception."""

    def meeting_store(self) -> Any:
        """Return the torch.distributed.Store by which torch's groups of the present ranks form;
        None: torch's own, which the launcher's variables name.
        """
        return None

    def end_meeting(self) -> None:
        """Close what `meeting_store` has opened."""


def ranks_of(launcher: Launcher) -> Ranks:
    """Return the ranks of this process, under an engine that can have them assigned again."""
    for extension in extensions():
        for variable, target in extension.ranks.items():
            if variable in os.environ:
                ranks: Ranks = resolve(target)(launcher)
                return ranks
    return Ranks(launcher)


def check_ranks(ranks: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return engine.process_set in ascending order.

    Raises:
        ConfigError: it is empty, repeats a rank, or names one that was not started.
    """
    chosen = tuple(sorted(set(ranks)))
    if not chosen or len(chosen) != len(ranks) or chosen[0] < 0 or chosen[-1] >= world_size:
        raise ConfigError(
            f"engine.process_set is {list(ranks)}; it must list ranks from 0 to {world_size - 1},"
            f" each once, one at least ({world_size} {'was' if world_size == 1 else 'were'}"
            " started), or be null for all."
        )
    return chosen
