"""The golden checkpoint, written before the code had its present shape:
today's code resumes from it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.record import CHECKPOINT, processor, train_net


def test_a_checkpoint_of_older_code_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The run ends with the weights of the one that never stopped;
    on another processor, to six digits.
    """
    stored = json.loads((CHECKPOINT.parent / "weights.json").read_text())
    found = train_net(tmp_path, 10, ckpt_path=str(CHECKPOINT))
    if processor() == stored["processor"]:
        assert found == stored["weights"]
    else:
        assert found == pytest.approx(stored["weights"], rel=1e-6)
