"""The Horovod engine in an elastic job, without one."""

from __future__ import annotations

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.elastic.client import Membership

pytest.importorskip("horovod")


def test_a_script_of_an_elastic_job_has_one_fit_and_begins_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that joins later starts the script from its top."""
    from trainkit.engine.horovod.engine import HorovodEngine

    monkeypatch.setattr(Membership, "_current", Membership("a/0#1", ("127.0.0.1", 1), "secret"))
    monkeypatch.setenv("TRAINKIT_WORKER", "a/0#1")
    monkeypatch.setattr(Membership, "beat", lambda self: None)
    engine = HorovodEngine("cpu")
    assert engine.ranks.is_elastic
    with pytest.raises(ConfigError, match="does validate before the fit"):
        engine.ranks.begin("validate")
    engine.ranks.begin("fit")
    engine.ranks.begin("test")
    with pytest.raises(ConfigError, match="does a second fit"):
        HorovodEngine("cpu").ranks.begin("fit")


def test_outside_an_elastic_job_a_script_does_what_it_likes() -> None:
    """No rank joins later."""
    from trainkit.engine.horovod.engine import HorovodEngine

    engine = HorovodEngine("cpu")
    for stage in ("validate", "fit", "fit"):
        engine.ranks.begin(stage)
