"""When copies are made, and where they go: every `commit_every_n_steps`, to the next hosts.

A copy is a checkpoint without a file (store.py): the state goes to host memory, and from there a
thread sends it. The next begins once the last has been sent on all ranks.
"""

from __future__ import annotations

import http.client
import os
from typing import Any

from trainkit.api.view import RunView
from trainkit.checkpoint.manager import CheckpointManager
from trainkit.checkpoint.parts import file_of
from trainkit.checkpoint.writer import Writer
from trainkit.console import plural
from trainkit.errors import ConfigError
from trainkit.extensions.elastic.client import Membership
from trainkit.extensions.elastic.copies.client import Address
from trainkit.extensions.elastic.copies.peers import Holders, Peers
from trainkit.extensions.elastic.copies.server import REGISTER
from trainkit.extensions.elastic.copies.store import PeerStore, name_of
from trainkit.extensions.elastic.ranks import ElasticRanks
from trainkit.extensions.reports.grid import human

_HOST = "HOROVOD_HOSTNAME"
_TORCHRUN = (
    "or leave callbacks.elastic.copies out: a run that is started again resumes from its checkpoint"
)


def announce(copies: int) -> None:
    """Say to this process's driver that copies are wanted; before the engine asks for a rank.

    Raises:
        ConfigError: there is no driver that starts copy servers.
    """
    if Membership.current() is None or not os.environ.get("TRAINKIT_HOLDS_COPIES"):
        raise ConfigError(
            f"callbacks.elastic.copies is {copies}, and nothing holds copies under this launcher: a"
            " process on each host, which outlives the ranks, is started by `python -m trainkit"
            f" launch` (or an elastic horovodrun). Start the job with it, {_TORCHRUN}."
        )
    ElasticRanks.requested_copies = copies


class Copies:
    """The copies of one run, and what it resumes from. Made in `setup`, on all ranks.

    Args:
        trainer: the run.
        copies: hosts that hold a copy of each rank's state, beside the rank's own.
        every_n_steps: steps between two copies.

    Raises:
        ConfigError: each rank has all state, or there are too few hosts.
    """

    def __init__(self, trainer: RunView, copies: int, every_n_steps: int) -> None:
        engine = trainer.engine
        if not engine.splits_weights:
            raise ConfigError(
                f"callbacks.elastic.copies is {copies}, and engine is {engine.name}: each rank holds"
                " all weights and the optimizer's state, so that copies would have no effect. Leave"
                " callbacks.elastic.copies out; engine=fsdp splits weights."
            )
        hosts = engine.comm.all_gather_object(os.environ[_HOST])
        self._trainer, self._every = trainer, every_n_steps
        self._last = -1
        self._is_slow = False
        membership = Membership.current()
        assert membership is not None, "announce() has seen it"
        self._membership = membership
        rank, ranks = engine.ranks.rank, engine.ranks.world_size
        peers = Peers(self._servers, membership.link.secret, holders_of(hosts, rank, copies))
        if len(peers.holders.others) < copies:
            self._too_few(sorted(set(hosts)), copies)
        is_late = engine.ranks.joins_late
        own = file_of(rank, ranks)
        self.store = PeerStore(peers, own, self._is_fresh, is_late, trainer.say)
        trainer.checkpoints.stores.append(self.store)
        self._writer = Writer()
        self._manager = CheckpointManager(engine, [self.store], trainer.say, self._writer)

    def _too_few(self, hosts: list[str], copies: int) -> None:
        text = (
            f"callbacks.elastic.copies is {copies}, and all ranks are on"
            f" {plural(len(hosts), 'host')} ({', '.join(hosts)}): a copy belongs on another host"
        )
        if not self._trainer.engine.ranks.joins_late:
            raise ConfigError(
                f"{text}. Start on {copies + 1} hosts or more (-H a:4,b:4), {_TORCHRUN}."
            )
        self._trainer.say(f"WARNING: {text}, and hosts are lost. A further loss loses the copies.")

    def begin(self) -> None:
        """Report what the run has resumed from, and make a first copy: those on a host that is lost
        are lost.
        """
        trainer, store = self._trainer, self.store
        if trainer.checkpoints.resumed_from == store.path_of(store.fetched):
            total = trainer.engine.comm.sum_number
            here, elsewhere = total(store.peers.read_here), total(store.peers.read_elsewhere)
            others = "0 bytes" if store.came_first else "the manifests"
            trainer.say(
                f"Resumed from the memory of peers at step {trainer.global_step}: {human(here)} of the"
                f" ranks' own hosts, {human(elsewhere)} of other hosts, {others} of checkpoints."
            )
        store.release()
        self._manager.connect(trainer.checkpoints.contents)
        self.copy()

    def copy_if_due(self) -> None:
        """Make a copy, if it is time and the last one has been sent. Call it on all ranks."""
        trainer = self._trainer
        step = self._trainer.global_step
        every = self._every
        if step // every == self._last // every:
            return
        if not trainer.engine.comm.sum_number(int(self.is_sending)):
            self.copy()
        elif not self._is_slow and step >= self._last + 2 * every:
            self._is_slow = True
            trainer.say(
                f"The copy of step {self._last} is still being sent to other hosts at step {step}: the"
                " next one begins after it, so that a lost host costs more steps than"
                f" commit_every_n_steps={every}."
            )

    @property
    def is_sending(self) -> bool:
        """Whether this rank's last copy is still under way."""
        return self._writer.is_busy

    def copy(self) -> None:
        """Copy the state to host memory, and send it beside training. Call it on all ranks."""
        self._last = self._trainer.global_step
        self._manager.save(self.store, name_of(self._last, self._membership.generation))

    def wait(self) -> None:
        """Wait until the last copy has been sent."""
        self._writer.wait()

    def _servers(self) -> dict[str, Address]:
        addresses = self._ask()["copies"]
        return {host: (str(where[0]), int(where[1])) for host, where in addresses.items()}

    def _is_fresh(self, step: int) -> bool:
        """Return whether a copy is not older than two intervals, by the newest step that a rank has
        reported.
        """
        return int(self._ask()["step"]) - step <= 2 * self._every

    def _ask(self) -> dict[str, Any]:
        link = self._membership.link
        connection = link.connect()
        try:
            request = {"worker": self._membership.worker, "generation": 0, "address": None}
            return link.ask(connection, REGISTER, request)
        except http.client.HTTPException as error:
            raise OSError(f"the driver does not answer: {error!r}") from error
        finally:
            connection.close()


def holders_of(hosts: list[str], rank: int, copies: int) -> Holders:
    """Return who holds a rank's copies: the hosts after its own, in the order of ranks, as many as
    there are.
    """
    order = list(dict.fromkeys(hosts))
    own = order.index(hosts[rank])
    others = [order[(own + i) % len(order)] for i in range(1, min(copies, len(order) - 1) + 1)]
    return Holders(hosts[rank], tuple(others))
