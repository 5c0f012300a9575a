"""A script runs up to its first fit, which is handed over; other scripts are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.script.command_line import Script
from trainkit.extensions.script.running import FirstFit, run_script
from trainkit.run.around_fit import RequestedFit, in_force

START = """
import sys, torch, trainkit
from torch.utils.data import DataLoader, TensorDataset

class Line(trainkit.Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
def trainer(**more):
    return trainkit.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, **more)
"""
LOOP = """
with trainkit.Loop(torch.nn.Linear(2, 1), torch.optim.SGD([torch.ones(1)], lr=1.0), loader,
                   max_epochs=1) as loop:
    raise ValueError("the body is not reached")
"""


def run(
    tmp_path: Path, text: str, *arguments: str, look: Any = None, start: str = START
) -> list[RequestedFit]:
    """Run a script; return the fits that were handed over."""
    path = tmp_path / "mine.py"
    path.write_text(start + text)
    seen: list[RequestedFit] = []
    script = Script(str(path), arguments)
    run_script(script, FirstFit(script, look or (lambda fit, _: seen.append(fit))))
    return seen


def test_the_fit_is_handed_over_and_the_script_ends(tmp_path: Path) -> None:
    """Task, data and settings are the script's; nothing is trained, and what follows is not run."""
    (fit,) = run(
        tmp_path,
        "trainer(seed=int(sys.argv[1]), accumulate_grad_batches=2).fit(Line(), loader)\n"
        "open('after', 'w')\ntrainer()",
        "7",
    )
    assert type(fit.task).__name__ == "Line"
    assert (fit.options.seed, fit.options.batch.accumulate_grad_batches) == (7, 2)
    assert fit.data.given["train"].batch_size == 4
    assert not (tmp_path / "after").exists()


def test_the_fit_of_a_loop_is_handed_over(tmp_path: Path) -> None:
    """Before the loop's body begins."""
    (fit,) = run(tmp_path, LOOP)
    assert type(fit.task).__name__ == "Linear"


def test_a_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    """As __main__, with its folder in the import path; both are as before afterwards."""
    (tmp_path / "beside.py").write_text("name = 'beside'")
    before, paths = list(sys.argv), list(sys.path)
    run(
        tmp_path,
        "import beside\nassert __name__ == '__main__' and sys.argv[1:] == ['--x', 'y=1']\n"
        "assert sys.path[0] == __file__.rpartition('/')[0]\ntrainer().fit(Line(), loader)",
        "--x",
        "y=1",
    )
    assert (sys.argv, sys.path) == (before, paths)
    assert in_force() is None


def test_an_except_of_the_script_hides_no_error(tmp_path: Path) -> None:
    """What a command raises about the fit is raised, though the script catches all."""

    def refuse(fit: RequestedFit, _: Any) -> None:
        raise TaskError("not this one")

    text = "try:\n    trainer().fit(Line(), loader)\nexcept BaseException:\n    pass"
    with pytest.raises(TaskError, match="not this one"):
        run(tmp_path, text, look=refuse)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "ended without a fit: it constructs no trainkit.Trainer and no trainkit.Loop"),
        ("trainer()", "constructs a Trainer or a Loop, and never calls fit"),
        ("if __name__ == 'mine': trainer().fit(Line(), loader)", "ended without a fit"),
        ("sys.exit(3)", r"ended in line 19 with sys.exit\(3\), before it called fit"),
        ("exit()", r"ended in line 19 with sys.exit\(\), before"),
        (
            "trainer()\ntrainer().fit(Line(), loader)",
            "two Trainers or Loops, in line 19 and in line 20",
        ),
        ("1 / 0", r"(?s)ended with an error before it called fit.*line 19.*ZeroDivisionError"),
        ("import not_there", "(?s)ended with an error.*ModuleNotFoundError"),
        ("def broken(:", "is not Python: line 19: invalid syntax"),
        ("x = '\0'", "is not Python: .*null bytes"),
        ("trainkit.Trainer(max_epoch=1)", r"max_epoch.* \(mine.py, line 19\)"),
    ],
)
def test_a_script_without_a_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """In a sentence that names the line and says what to write; the exit code is 2."""
    with pytest.raises(ConfigError, match=message) as raised:
        run(tmp_path, text)
    assert raised.value.exit_code == 2


def test_a_second_trainer_is_refused_even_if_caught(tmp_path: Path) -> None:
    """Which fit is meant is not known, whatever the script catches."""
    text = "first = trainer()\ntry:\n    trainer()\nexcept BaseException:\n    pass\n"
    with pytest.raises(ConfigError, match="two Trainers or Loops"):
        run(tmp_path, text + "first.fit(Line(), loader)")


def test_bytes_are_not_python(tmp_path: Path) -> None:
    """A file of another kind that is named .py is refused, not decoded."""
    path = tmp_path / "mine.py"
    path.write_bytes(b"\x89PNG\r\n\xff\xfe")
    script = Script(str(path))
    with pytest.raises(ConfigError, match="is not Python"):
        run_script(script, FirstFit(script, lambda fit, _: None))
