"""What a cluster's nodes have and have free, as a job that waits states it. Imports no ray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainkit.extensions.ray.options import RayOptions, shown


@dataclass(frozen=True)
class Node:
    """A living node: its resources by Ray's names, and those that are free."""

    total: Mapping[str, float]
    free: Mapping[str, float]


def free_on(nodes: Sequence[Node], options: RayOptions) -> str:
    """Return what is free in the cluster, and what it has, with the largest node:
    a bundle must fit on one.
    """
    free, total = _sum([node.free for node in nodes]), _sum([node.total for node in nodes])
    text = f"free now: {shown(free)} of {shown(total)} on {len(nodes)} nodes"
    if len(nodes) < 2:
        return text
    bundles = options.least // options.per_bundle
    one = options.bundle
    if options.strategy == "STRICT_PACK":
        one = {name: amount * bundles for name, amount in one.items()}
    if options.strategy == "STRICT_SPREAD":
        have = sum(_fits(node.total, one) for node in nodes)
        now = sum(_fits(node.free, one) for node in nodes)
        return (
            f"{text}; {bundles} nodes with {shown(one)} each are needed, {have} have it, {now} have"
            " it free"
        )
    has = _most([node.total for node in nodes], one)
    has_free = _most([node.free for node in nodes], one)
    what = "all on one node" if options.strategy == "STRICT_PACK" else "each bundle on one node"
    return (
        f"{text}; {what}, {shown(one)}: the largest node has {shown(has)}, the most that one has"
        f" free is {shown(has_free)}"
    )


def _most(nodes: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> dict[str, float]:
    """Return of the resources that are needed those of the node that has the most of them."""
    having = [{name: node.get(name, 0) for name in needed} for node in nodes]
    return max(
        having, key=lambda has: sorted(has[name] / amount for name, amount in needed.items())
    )


def _fits(has: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(has.get(name, 0) >= amount for name, amount in needed.items())


def plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Return resources without those that Ray makes itself."""
    own = ("node:", "object_store", "bundle")
    return {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(own) and "_group_" not in name
    }


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in plain(part))
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def ranks_in(nodes: Sequence[Mapping[str, float]], resources: Mapping[str, float]) -> int:
    """Return how many ranks nodes with these resources hold at a time."""
    return sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in resources.items())
        for node in nodes
    )


def lacked(nodes: Sequence[Mapping[str, float]], needed: Mapping[str, float]) -> str | None:
    """Return the first resource that is needed and that no node has so much of."""
    for name, amount in needed.items():
        if not any(node.get(name, 0) >= amount for node in nodes):
            return name
    return None


def adds_nodes(status: bytes) -> bool | None:
    """Return whether a cluster has an autoscaler, by the status that its monitor reports; None if
    it has not reported yet, or in another form.

    Without an autoscaler the monitor only reads: a node's type is its own id.
    """
    try:
        report = json.loads(status)["autoscaler_report"]
        types = {*report["active_nodes"], *(report["idle_nodes"] or ())}
        read_only = {f"node_{node}" for node in report["node_type_mapping"]}
        is_adding = bool(report["pending_launches"] or report["pending_nodes"])
    except (ValueError, KeyError, TypeError):
        return None
    return is_adding or not types <= read_only if types or is_adding else None
