"""Features of a fit: what they bring is used, and no two bring the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import ConfigError
from trainkit.run.feature import Feature, Features


class Brings(Feature):
    """Brings one part of a step, and one of a checkpoint."""

    def __init__(self, name: str, part: str, key: str = "") -> None:
        self.name, self.key, self._part = name, key, part

    def in_step(self, run: Any, optimizers: Any) -> Mapping[str, Any]:
        """Name the part."""
        return {self._part: self.name}

    def parts(self, run: Any) -> Mapping[str, Any]:
        """Name it too."""
        return self.in_step(run, ())


def test_what_two_features_bring_is_joined() -> None:
    """In their order."""
    both = Features([Brings("first", "a"), Brings("second", "b")])
    assert both.in_step(cast(Any, None), ()) == {"a": "first", "b": "second"}


def test_two_that_bring_the_same_are_refused() -> None:
    """One of them would have no effect."""
    both = Features(
        [Brings("clip", "update", key="configure_gradient_clipping"), Brings("b", "update")]
    )
    text = "configure_gradient_clipping and b both bring a fit's 'update': leave one of them out"
    for ask in (lambda run: both.in_step(run, ()), both.parts):
        with pytest.raises(ConfigError, match=text):
            ask(cast(Any, None))


@pytest.mark.parametrize(
    ("option", "value", "extension"),
    [
        ("activation_checkpointing", ["Line"], "recompute"),
        ("sync_batchnorm", True, "sync_batchnorm"),
        ("halve_batch_on_oom", True, "halving"),
    ],
)
def test_a_copy_without_the_extension_refuses_its_option(
    option: str, value: Any, extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have no effect."""
    monkeypatch.setattr("trainkit.extension.features", lambda stage: [])
    with pytest.raises(
        ConfigError, match=f"trainer.{option} is .* lacks the extension '{extension}'"
    ):
        quiet(tmp_path, **{option: value}).fit(Line(), loader(8))
