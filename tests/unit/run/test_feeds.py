"""The feeds of a run: what cannot be trained or validated is refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import ConfigError


def test_each_stretch_of_epochs_can_be_validated_in(tmp_path: Path) -> None:
    """Where accumulation makes later epochs shorter than val_check_interval,
    it is refused by the epoch's number.
    """
    with pytest.raises(ConfigError, match=r"val_check_interval is 3, but epoch 1 has 2 steps"):
        quiet(
            tmp_path, max_epochs=2, accumulate_grad_batches={0: 1, 1: 4}, val_check_interval=3
        ).fit(Line(), loader(24), loader(4))
