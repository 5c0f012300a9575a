"""Slots' arithmetic: which bundle is slot 2 of a host, as nodes come and go."""

from __future__ import annotations

from trainkit.extensions.ray.places import Places, WorkerPlace

ADDRESSES = {"aaaaaaaa1": "10.0.0.1", "bbbbbbbb2": "10.0.0.2", "cccccccc3": "10.0.0.1"}


def test_bundles_become_slots_of_hosts() -> None:
    """Named by address; bundles of several groups on one node follow each other."""
    places = Places()
    found = places.update({"aaaaaaaa1": [(0, 1), (0, 0)], "bbbbbbbb2": [(1, 0)]}, ADDRESSES)
    assert found == {"10.0.0.1": 2, "10.0.0.2": 1}
    assert places.of("10.0.0.1", 0) == WorkerPlace(0, 0) and places.of(
        "10.0.0.1", 1
    ) == WorkerPlace(0, 1)
    assert places.of("10.0.0.2", 0) == WorkerPlace(1, 0)


def test_a_second_node_of_an_address_is_another() -> None:
    """Raylets of one machine: the later one has six digits of its id in its name."""
    places = Places()
    assert list(places.update({"aaaaaaaa1": [(0, 0)], "cccccccc3": [(0, 1)]}, ADDRESSES)) == [
        "10.0.0.1",
        "10.0.0.1-cccccc",
    ]
    assert places.addresses["10.0.0.1-cccccc"] == "10.0.0.1"


def test_a_place_that_stays_keeps_its_slot() -> None:
    """Others that come are added after it, whatever their numbers."""
    places = Places()
    places.update({"aaaaaaaa1": [(1, 0)]}, ADDRESSES)
    assert places.update({"aaaaaaaa1": [(0, 0), (1, 0)]}, ADDRESSES) == {"10.0.0.1": 2}
    assert places.of("10.0.0.1", 0) == WorkerPlace(1, 0) and places.of(
        "10.0.0.1", 1
    ) == WorkerPlace(0, 0)


def test_a_host_that_goes_has_no_slots_and_keeps_its_name() -> None:
    """Its bundles may come back on another node, and it may come back itself."""
    places = Places()
    places.update({"aaaaaaaa1": [(0, 0)], "bbbbbbbb2": [(0, 1)]}, ADDRESSES)
    assert places.update({"bbbbbbbb2": [(0, 1), (0, 0)]}, ADDRESSES) == {"10.0.0.2": 2}
    assert places.of("10.0.0.1", 0) is None and places.of("10.0.0.2", 1) == WorkerPlace(0, 0)
    assert places.update({"aaaaaaaa1": [(2, 0)], "bbbbbbbb2": [(0, 1)]}, ADDRESSES) == {
        "10.0.0.2": 1,
        "10.0.0.1": 1,
    }


def test_workers_that_share_a_bundle_have_a_place_each() -> None:
    """Three workers a bundle: three slots on its host."""
    places = Places(per_bundle=3)
    assert places.update({"aaaaaaaa1": [(0, 0)]}, ADDRESSES) == {"10.0.0.1": 3}
    assert [places.of("10.0.0.1", n) for n in range(4)] == [
        WorkerPlace(0, 0, 0),
        WorkerPlace(0, 0, 1),
        WorkerPlace(0, 0, 2),
        None,
    ]
