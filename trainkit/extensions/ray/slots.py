"""Slots of a job on Ray: bundles of placement groups, by the node that holds them.

The first `least` workers are one group, all or nothing: two jobs never hold half of a cluster each.
Once it is placed, each further bundle is a group of its own, which waits for resources, and so
shows an autoscaler how many are wanted. Slots of a node that drains (a spot notice) are taken away
at once: its workers commit, and leave before the node goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import ray
from ray._private.state import state as cluster_state
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainkit.errors import ConfigError
from trainkit.extensions.ray.connection import head_answers
from trainkit.extensions.ray.options import RayOptions
from trainkit.extensions.ray.places import Places
from trainkit.safety.threads import printed, start_thread

EVERY_S = 0.5
_LOST_S = 5.0  # so long the head may not answer before the job is asked to end


class Slots:
    """The driver's HostSource; must be closed.

    Attributes:
        is_inside: whether this process is in a trial of Tune; then the trial's bundles are used.
        on_head_lost: called once, from another thread, if the cluster's head does not answer for a
            while.
        is_head_lost: whether that has happened: questions to Ray would wait for a minute, and end
            this process.

    Raises:
        ConfigError: inside a trial of Tune whose placement group has too few bundles.
    """

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        current = get_current_placement_group()
        self.is_inside = current is not None
        # Of a Tune trial bundle 0 is the trial's own; Ray makes none for a trial that takes nothing
        # itself.
        self._own_bundles = 0 if current is None else len(current.bundle_specs) - options.most
        if current is not None and self._own_bundles < 0:
            raise ConfigError(
                f"num_workers is {options.most}, and this trial's placement group has"
                f" {len(current.bundle_specs)} bundles: one for each worker is needed, as"
                " PlacementGroupFactory([{}] + [worker] * n)."
            )
        first = options.least // options.per_bundle
        last = options.most // options.per_bundle
        self._groups: list[PlacementGroup] = [
            current or placement_group([options.bundle] * first, strategy=options.strategy)
        ]
        # bundles to ask for once the first group is whole
        self._further = 0 if self.is_inside else last - first
        self._places = Places(options.per_bundle)
        # (group, bundle) on a draining node -> the group in its place
        self._substitutes: dict[tuple[int, int], int] = {}
        self.on_head_lost: Callable[[], None] = lambda: None
        self.is_head_lost = False
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def ask(self) -> dict[str, int]:
        """Return slots by host, as they are now; the first group counts once it is whole."""
        draining = set(cluster_state.get_draining_nodes())
        nodes = {
            n["NodeID"]: n["NodeManagerAddress"]
            for n in ray.nodes()
            if n["Alive"] and n["NodeID"] not in draining
        }
        placed: dict[tuple[int, int], str] = {}
        for number, group in enumerate(self._groups):
            table = placement_group_table(group)
            if table["state"] in ("CREATED", "RESCHEDULING"):
                placed |= {
                    (number, int(bundle)): node
                    for bundle, node in table["bundles_to_node_id"].items()
                }
        if placed and self._further:  # sooner they could take what the first group waits for
            self._groups += [placement_group([self.options.bundle]) for _ in range(self._further)]
            self._further = 0
        if not self.is_inside:
            self._substitute(placed, draining, nodes)
        bundles: dict[str, list[tuple[int, int]]] = {}
        for key, node in placed.items():
            if node in nodes and key not in self._substitutes and key[1] >= self._own_bundles:
                bundles.setdefault(node, []).append(key)
        with self._lock:
            return self._places.update(bundles, nodes)

    def _substitute(
        self, placed: Mapping[tuple[int, int], str], draining: set[str], nodes: Mapping[str, str]
    ) -> None:
        """Ask for a bundle in place of each that is on a draining node:
        Ray moves that one only when the node is gone.
        """
        for key, node in placed.items():
            if node in draining and key not in self._substitutes:
                self._substitutes[key] = len(self._groups)
                self._groups.append(placement_group([self.options.bundle]))
            elif (
                node in nodes
                and (number := self._substitutes.get(key)) is not None
                and (number, 0) not in placed
            ):
                remove_placement_group(self._groups[number])  # the bundle itself was moved first
                del self._substitutes[key]

    def strategy_of(self, host: str, slot: int) -> PlacementGroupSchedulingStrategy | None:
        """Return where an actor has to go for a slot, or None if the slot is gone."""
        with self._lock:
            place = self._places.of(host, slot)
        if place is None:
            return None
        return PlacementGroupSchedulingStrategy(
            self._groups[place.group], placement_group_bundle_index=place.bundle
        )

    def address_of(self, host: str) -> str:
        """Return a host's address."""
        return self._places.addresses[host]

    def watch(
        self,
        known: dict[str, int],
        on_change: Callable[[dict[str, int]], None],
        say: Callable[[str], None],
    ) -> None:
        """See HostSource."""
        head = ray.get_runtime_context().gcs_address

        def run() -> None:
            last = dict(known)
            silent_s = 0.0
            while not self._stop.wait(EVERY_S):
                # before any question to it, which would wait for a minute
                if not head_answers(head):
                    silent_s += EVERY_S
                    if silent_s >= _LOST_S:
                        say(
                            f"the head of the Ray cluster, {head}, does not answer: the job ends"
                            " with a checkpoint"
                        )
                        self.is_head_lost = True
                        self.on_head_lost()
                        return
                    continue
                silent_s = 0.0
                hosts = self.ask()
                if hosts != last:
                    last = dict(hosts)
                    on_change(hosts)

        start_thread(
            "slots", run, printed("The slots stay unchanged until Ray answers.", retry_s=EVERY_S)
        )

    def close(self) -> None:
        """Give the resources back."""
        self._stop.set()
        for group in () if self.is_inside or self.is_head_lost else self._groups:
            remove_placement_group(group)
