"""What check-engine refuses before it starts a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import Command, command
from trainkit.extensions.check_engine.command import main
from trainkit.extensions.check_engine.problem import error_of

__all__ = ["command"]

MINE = """
import torch
import trainkit
from torch.utils.data import DataLoader, TensorDataset

class Mine(trainkit.Task):
    automatic_optimization = {automatic}

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = {data}
trainkit.Trainer(max_epochs=1, {settings}).fit(Mine(), data)
"""
DATA, EVEN = (f"DataLoader(TensorDataset(torch.ones({n}, 3)), 2)" for n in (5, 8))
LATER = "accumulate_grad_batches={0: 1, 1: 2}"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("steps=0", "steps is '0'; it must be a whole number, 1 or more"),
        ("ranks=0", "ranks is '0'; it must be a whole number, 1 or more"),
        ("float64=maybe", "float64 is 'maybe'; it must be true or false"),
        ("engine.tensor=2", "stands before a script, without its engine. Write it before: engine="),
        ("stepz=3", "check-engine has no option 'stepz'. Did you mean 'steps'?"),
    ],
)
def test_a_bad_option_is_refused(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is imported, with exit code 2."""
    (tmp_path / "mine.py").touch()
    assert main("check-engine", [option, str(tmp_path / "mine.py")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("typed", "of_script", "message"),
    [
        ("ranks=1", {}, "ranks is 1 with engine=auto: that is one process, and nothing to compare"),
        ("engine=single", {}, "engine=single has one rank"),
        ("ranks=9", {}, "training data has 5 samples for 9 ranks"),
        ("engine=odd", {}, "engine is 'odd'; it must be one of"),
        ("engine=fsdp engine.tensor=3", {}, "engine.tensor is 3, and there are 2 ranks"),
        ("engine=ddp", {"automatic": "False"}, "Mine has automatic_optimization = False"),
        ("engine=ddp", {"settings": LATER}, "The accumulation changes by epoch: one process"),
        (
            "engine=ddp",
            {"settings": "sync_batchnorm=True", "data": EVEN},
            "one process needs batches of 4",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(
    typed: str, of_script: dict[str, str], message: str, command: Command, tmp_path: Path
) -> None:
    """In a sentence, with exit code 2, before a run is started."""
    text = {"automatic": "True", "settings": "", "data": DATA} | of_script
    (tmp_path / "mine.py").write_text(MINE.format(**text))
    done = command(f"python -m trainkit check-engine {typed} mine.py")
    assert done.code == 2, done.text
    assert message in " ".join(done.err.split())
    assert "1/4" not in done.out


@pytest.mark.parametrize(
    ("precision", "dtype", "bits"),
    [("32-true", None, 23), ("64-true", None, 52), ("32-true", "bf16", 8), ("16-mixed", None, 11)],
)
def test_the_rounding_error_is_that_of_the_coarsest_numbers(
    precision: str, dtype: str | None, bits: int
) -> None:
    """Of the precision, or of gathered weights."""
    assert error_of(precision, dtype) == 2.0**-bits
