"""No public name goes without the warning of a release before."""

from __future__ import annotations

from tests.golden import public


def test_public_names_stay_or_have_warned() -> None:
    """Each name of an earlier release is there, or WARNED names a release that warned before."""
    names = public.present()
    assert len(names) > 1000
    assert public.broken(names, public.stored(), public.WARNED) == []


def test_a_name_that_goes_in_silence_is_seen() -> None:
    """A name of a release that is gone is reported, unless an earlier release has warned."""
    releases = {"0.1.0": ["trainkit.Old", "trainkit.Task"]}
    names = {"trainkit.Task"}
    assert public.broken(names, releases, {}) == ["trainkit.Old, public since 0.1.0"]
    assert public.broken(names, releases, {"trainkit.Old": "0.1.0"}) == []
    assert public.broken(names, releases, {"trainkit.Old": public.__version__}) != []


def test_a_method_that_a_base_has_now_is_there() -> None:
    """A user calls it all the same; one that no class has is gone."""
    releases = {"0.1.0": ["trainkit.CSVLogger.log_metrics", "trainkit.CSVLogger.log_nothing"]}
    assert public.broken(set(), releases, {}) == [
        "trainkit.CSVLogger.log_nothing, public since 0.1.0"
    ]
