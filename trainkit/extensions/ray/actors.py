"""Actors that are ranks themselves:
a function runs in each one's main thread, on the signed rendezvous of this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.elastic.network import nccl_interface
from trainkit.extensions.elastic.rendezvous import Server
from trainkit.extensions.elastic.signing import SECRET, new_secret
from trainkit.extensions.ray.backend import cause_of
from trainkit.extensions.ray.cluster import free_and_total
from trainkit.extensions.ray.exits import exit_code_of, note_exits
from trainkit.extensions.ray.keeper import interface_of
from trainkit.extensions.ray.options import RayOptions
from trainkit.extensions.ray.sent import sendable, without_colors

# so long other ranks may take to report the same fault, of which one names the cause
_LATER_S = 1.0
_SILENT_S = 2.0  # a longer wait for resources is printed
_CONSEQUENCES = ("HorovodInternalError", "PeerError", "JobEnded")  # of another rank's end


class Rank:
    """To be made an actor; its methods run in its main thread,
    so that signal handlers and torch work as in a script.
    """

    def __init__(self) -> None:
        note_exits()

    def where(self) -> tuple[str, str]:
        """Return the node's id and its address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def call(
        self,
        environ: Mapping[str, str],
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a function as the rank that the environment says."""
        interface = interface_of(ray.util.get_node_ip_address())
        os.environ |= dict(environ) | {"HOROVOD_GLOO_IFACE": interface}
        os.environ |= nccl_interface(interface, os.environ)
        try:
            return fn(*args, **kwargs)
        except SystemExit as ended:  # Ray would end the actor, and lose the code
            raise EngineError(
                f"rank {os.environ['HOROVOD_RANK']} ended with exit code {ended.code}: {ended}"
            ) from ended
        except Exception as error:
            if (sent := sendable(error)) is error:
                raise
            raise sent from None


class Actors:
    """Ranks as actors of one placement group, those of a node next to each other; must be closed.

    Raises:
        ConfigError: their resources do not come in time, or a node cannot start one.
    """

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._group = placement_group(
            [options.bundle] * (options.least // options.per_bundle), strategy=options.strategy
        )
        self._runs = 0
        self._actors: list[Any] = []
        self._secret = new_secret()
        self._address = ray.util.get_node_ip_address()
        self._server = Server(
            self._address, self._secret, lambda request: None, lambda request: None
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        options = self._options
        silent_s = min(_SILENT_S, options.start_timeout_s)
        if not self._group.wait(silent_s):
            print(
                f"RayExecutor waits for {options.asked} ({options.strategy});"
                f" {free_and_total(options)}",
                file=sys.stderr,
                flush=True,
            )
        if not self._group.wait(options.start_timeout_s - silent_s):
            raise ConfigError(
                f"RayExecutor.num_workers asks for {options.asked} ({options.strategy}), and they"
                f" did not come within {options.start_timeout_s:g} s (start_timeout_s);"
                f" {free_and_total(options)}. Ask for less, wait for other jobs to end, or add"
                " nodes."
            )
        kind = ray.remote(Rank)
        for number in range(options.least):
            strategy = PlacementGroupSchedulingStrategy(self._group, number // options.per_bundle)
            self._actors.append(
                kind.options(**options.actor, scheduling_strategy=strategy).remote()
            )
        try:
            nodes = [node for node, _ in ray.get([actor.where.remote() for actor in self._actors])]
        except RayError as error:
            raise ConfigError(
                f"The actors of the ranks cannot start: {cause_of(error)} They need trainkit and"
                " its Horovod: name them in runtime_env (env_vars: {PYTHONPATH: ...}, or an"
                " image), or install them on all nodes."
            ) from None
        order = sorted(range(len(nodes)), key=lambda i: nodes.index(nodes[i]))
        self._actors = [self._actors[i] for i in order]
        self._assignments = assignments([nodes[i] for i in order])

    def submit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Begin to call a function on all ranks; return references to the results, by rank."""
        self._runs += 1
        given = {
            SECRET: self._secret,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.port),
            "HOROVOD_RENDEZVOUS_SCOPE": f"g{self._runs}.",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "TRAINKIT_LAUNCHER": "ray",
        } | ({"TRAINKIT_GPU": "0"} if self._options.resources.get("GPU", 0) else {})
        pairs = zip(self._actors, self._assignments, strict=True)
        return [
            actor.call.remote(given | assignment, fn, list(args), dict(kwargs))
            for actor, assignment in pairs
        ]

    def results(self, references: list[Any]) -> list[Any]:
        """Wait for the results; the first error ends all ranks, which would wait for that one.

        Raises:
            Exception: the error that a rank's function raised; EngineError if the rank's process
                ended.
        """
        left = list(references)
        while left:
            done, left = ray.wait(left)
            if (error := self._error_of(references, done[0], None)) is not None:
                waits = left if _is_consequence(error) else []
                others = [self._error_of(references, reference, _LATER_S) for reference in waits]
                causes = [
                    other for other in others if other is not None and not _is_consequence(other)
                ]
                self._end()
                raise causes[0] if causes else error
        return ray.get(references)

    def _error_of(
        self, references: list[Any], reference: Any, timeout_s: float | None
    ) -> BaseException | None:
        """Return a rank's own error, or that of its actor; None if there is none in time."""
        try:
            ray.get(reference, timeout=timeout_s)
        except GetTimeoutError:
            return None
        except RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, Exception):
                return error
            if hasattr(cause, "add_note"):  # Python 3.11
                cause.add_note("".join(without_colors(str(error)).splitlines(keepends=True)[:-1]))
            return cause
        except RayActorError as error:
            rank = references.index(reference)
            code = exit_code_of(self._actors[rank])
            if code is not None:
                return EngineError(
                    f"Rank {rank} ended its process with exit code {code} (os._exit): see its"
                    " output."
                )
            return EngineError(
                f"Rank {rank} was lost: its process was killed by a signal (out of memory, a"
                f" segmentation fault), or its node is gone. Ray's report: {cause_of(error)}"
            )
        except RayError as error:
            return error
        return None

    def close(self) -> None:
        """End the actors, and give their resources back."""
        self._end()
        remove_placement_group(self._group)
        self._server.close()

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    @property
    def is_alive(self) -> bool:
        """Whether the ranks can be called: no error has ended them."""
        return bool(self._actors)


def assignments(nodes: Sequence[str]) -> list[dict[str, str]]:
    """Return the variables of each rank, by its node; ranks of a node are consecutive."""
    hosts = list(dict.fromkeys(nodes))
    result = []
    for rank, node in enumerate(nodes):
        local = nodes[:rank].count(node)
        peers = [host for host in hosts if nodes.count(host) > local]
        numbers = {
            "RANK": rank,
            "SIZE": len(nodes),
            "LOCAL_RANK": local,
            "LOCAL_SIZE": nodes.count(node),
        }
        numbers |= {"CROSS_RANK": peers.index(node), "CROSS_SIZE": len(peers)}
        result.append(
            {f"HOROVOD_{name}": str(value) for name, value in numbers.items()}
            | {"HOROVOD_HOSTNAME": node[:12]}
        )
    return result


def _is_consequence(error: BaseException) -> bool:
    return type(error).__name__ in _CONSEQUENCES
