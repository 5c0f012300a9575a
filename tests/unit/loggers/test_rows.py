"""flatten: a nested config as one table of plain values."""

from __future__ import annotations

from trainkit.loggers.rows import flatten


def test_nesting_becomes_dots_and_values_stay_plain() -> None:
    """Numbers, texts and booleans stay unchanged;
    lists and null become their JSON, other objects their text.
    """
    settings = {
        "seed": 0,
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.999], "fused": True},
        "task": {"net": {"width": 7}},
        "resume": None,
        "callbacks": {},
        "of": {1},
    }
    assert flatten(settings) == {
        "seed": 0,
        "optimizer.lr": 0.1,
        "optimizer.betas": "[0.9, 0.999]",
        "optimizer.fused": True,
        "task.net.width": 7,
        "resume": "null",
        "callbacks": "{}",
        "of": '"{1}"',
    }
