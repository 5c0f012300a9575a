"""The latest values, as trainer.callback_metrics."""

from __future__ import annotations

import pytest

from trainkit.metrics.latest import LatestMetrics


def test_a_name_that_was_not_logged_for_an_epoch_is_explained() -> None:
    """The error says which names there are, and that a step's value is logged by on_epoch=True;
    get and `in` are a dict's.
    """
    values = LatestMetrics()
    values.put({"val_loss": 0.5}, 4)
    with pytest.raises(KeyError, match=r"no 'train_acc', .* there are val_loss.*on_epoch=True"):
        values["train_acc"]
    with pytest.raises(KeyError, match=r"there are val_loss\. Did you mean 'val_loss'\?"):
        values["val/loss"]
    assert values.get("train_acc") is None and "train_acc" not in values
