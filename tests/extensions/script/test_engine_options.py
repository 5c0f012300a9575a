"""An engine before a script."""

from __future__ import annotations

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.script.engine_options import EngineOptions, split_engine


def test_an_engine_is_taken_with_its_options() -> None:
    """Numbers, lists and texts are read; other arguments stay."""
    words = [
        "engine=fsdp",
        "engine.tensor=2",
        "ranks=2",
        'engine.shard=["Block"]',
        "engine.device=cpu",
    ]
    engine, left = split_engine(words)
    assert engine == EngineOptions("fsdp", {"tensor": 2, "shard": ["Block"], "device": "cpu"})
    assert left == ["ranks=2"]
    assert EngineOptions(**engine.as_setting()) == engine


def test_no_engine_is_none() -> None:
    """The script's own stays."""
    assert split_engine(["ranks=2"]) == (None, ["ranks=2"])


def test_options_without_an_engine_are_refused() -> None:
    """The message says what to write."""
    with pytest.raises(ConfigError, match="engine=fsdp engine.tensor=2"):
        split_engine(["engine.tensor=2"])
