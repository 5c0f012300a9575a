"""Which bundle of a placement group is slot 2 of a host. Imports no ray.

A bundle stays on its node while the node lives, whatever happens to the actors in it, so (host,
slot) names one place in one bundle for as long as the host is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class WorkerPlace:
    """Room for one worker: the number of a group, a bundle in it,
    and a number within the bundle.
    """

    group: int
    bundle: int
    number: int = 0


class Places:
    """The places of a job, by host.

    Args:
        per_bundle: places in each bundle.
    """

    def __init__(self, per_bundle: int = 1) -> None:
        self._per_bundle = per_bundle
        self._by_host: dict[str, list[WorkerPlace]] = {}
        self._names: dict[str, str] = {}  # node id -> host's name
        self.addresses: dict[str, str] = {}  # host's name -> its address

    def update(
        self, bundles: Mapping[str, Sequence[tuple[int, int]]], addresses: Mapping[str, str]
    ) -> dict[str, int]:
        """Take what is placed now; return slots by host. A place that stays keeps its slot.

        Args:
            bundles: by node id, as (group, bundle).
            addresses: by node id. A host is named by its address, and by its node id too if another
                node has that address.
        """
        for node in bundles:
            if node not in self._names:
                address = addresses[node]
                name = f"{address}-{node[:6]}" if address in self._names.values() else address
                self._names[node], self.addresses[name] = name, address
        now = {
            self._names[node]: [
                WorkerPlace(*pair, number)
                for pair in sorted(pairs)
                for number in range(self._per_bundle)
            ]
            for node, pairs in bundles.items()
        }
        staying = {
            host: [place for place in places if place in now.get(host, ())]
            for host, places in self._by_host.items()
        }
        self._by_host = {host: places for host, places in staying.items() if places}
        for host, places in now.items():
            known = self._by_host.setdefault(host, [])
            known += [place for place in places if place not in known]
        return {host: len(places) for host, places in self._by_host.items()}

    def of(self, host: str, slot: int) -> WorkerPlace | None:
        """Return the place of a slot, or None if it is gone."""
        places = self._by_host.get(host, [])
        return places[slot] if slot < len(places) else None
