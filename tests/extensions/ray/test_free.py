"""What a job that waits for a cluster's resources states:
whether they are free, and whether one node can hold them.
"""

from __future__ import annotations

import json

import pytest

from trainkit.extensions.ray.free import Node, adds_nodes, free_on, lacked, ranks_in
from trainkit.extensions.ray.options import RayOptions

NODES = [
    Node({"CPU": 2}, {"CPU": 2}),
    Node({"CPU": 4, "node:10.0.0.2": 1}, {"CPU": 1}),
    Node({"CPU": 2}, {"CPU": 1}),
]
SUMS = "free now: {CPU: 4} of {CPU: 8} on 3 nodes"


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (
            "STRICT_PACK",
            (
                "all on one node, {CPU: 4}: the largest node has {CPU: 4}, the most that one has"
                " free is {CPU: 2}"
            ),
        ),
        (
            "PACK",
            (
                "each bundle on one node, {CPU: 1}: the largest node has {CPU: 4}, the most that"
                " one has free is {CPU: 2}"
            ),
        ),
        ("STRICT_SPREAD", "4 nodes with {CPU: 1} each are needed, 3 have it, 3 have it free"),
    ],
)
def test_a_request_that_fits_the_sum_names_what_one_node_has(strategy: str, text: str) -> None:
    """Four CPUs are free, and no node has four."""
    assert free_on(NODES, RayOptions(4, 4, {"CPU": 1}, strategy)) == f"{SUMS}; {text}"


def test_a_bundle_of_several_workers_is_on_one_node() -> None:
    """Two bundles of two workers with {CPU: 3} ask for {CPU: 6} each;
    a resource that no node has counts as 0.
    """
    found = free_on(NODES, RayOptions(4, 4, {"CPU": 3, "GPU": 1}, per_bundle=2))
    assert (
        "each bundle on one node, {CPU: 6, GPU: 2}: the largest node has {CPU: 4, GPU: 0}" in found
    )


def test_of_one_node_the_sum_is_all() -> None:
    """The largest node is the only one."""
    assert (
        free_on(NODES[:1], RayOptions(4, 4, {"CPU": 1}, "STRICT_PACK"))
        == "free now: {CPU: 2} of {CPU: 2} on 1 nodes"
    )


def test_room_is_counted_in_whole_ranks() -> None:
    """A rank is on one node; a tenth of a GPU ten times is one."""
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0}]
    assert ranks_in(nodes, {"CPU": 2}) == 1 and ranks_in(nodes, {"CPU": 1}) == 4
    assert ranks_in(nodes, {"GPU": 0.1}) == 10 and ranks_in(nodes, {"TPU": 1}) == 0


def test_what_no_node_has_is_named() -> None:
    """The sum over the nodes does not count: a bundle is on one node."""
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 4.0}]
    assert lacked(nodes, {"CPU": 4, "GPU": 1}) is None, "Ray says which bundles fit together"
    assert lacked(nodes, {"CPU": 1, "GPU": 2}) == "GPU" and lacked(nodes, {"TPU": 1}) == "TPU"
    assert lacked([], {"CPU": 1}) == "CPU"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({"active_nodes": {"node_a1": 1}}, False),
        ({"idle_nodes": {"node_a1": 1}}, False),
        ({"active_nodes": {"head": 1}}, True),
        ({"active_nodes": {"node_a1": 1}, "idle_nodes": {"worker": 1}}, True),
        ({"pending_launches": {"worker": 1}}, True),
        ({}, None),
    ],
)
def test_a_monitor_that_only_reads_adds_no_nodes(
    report: dict[str, object], expected: bool | None
) -> None:
    """It names a node's type by its id, an autoscaler by its config."""
    empty = {"active_nodes": {}, "idle_nodes": None, "pending_launches": {}, "pending_nodes": []}
    known = {"node_type_mapping": {"a1": "node_a1"}} | empty | report
    assert adds_nodes(json.dumps({"autoscaler_report": known}).encode()) is expected


@pytest.mark.parametrize("status", [b"no JSON", b"{}", b'{"autoscaler_report": {"a": 1}}', b"[]"])
def test_a_status_of_another_form_is_unknown(status: bytes) -> None:
    """As the first one of a new cluster, and what another version of Ray may write."""
    assert adds_nodes(status) is None
