"""Every command of docs/optimizers.md on finding settings runs, and prints the override to type."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command
from tests.helpers.pages import part

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
PRINTED = {
    "lr": r"(steepest|valley) +\S+ +optimizer\.lr=[\d.e-]+\n",
    "batch": (
        r"keeps +\d+ samples a step: data\.batch_size=\d+ trainer\.accumulate_grad_batches=\d+\n"
    ),
    "workers": r"enough +data\.num_workers=\d",
    "settings": r"fastest +(engine\.|the config's own)",
}


def commands() -> list[str]:
    """Return the page's commands."""
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", part(PAGE, "Finding settings"), flags=re.DOTALL)
        for line in block.splitlines()
    ]


@pytest.mark.parallel
@pytest.mark.parametrize("number", range(8))
def test_the_pages_commands_run(number: int, command: Command, tmp_path: Path) -> None:
    """Once, on rank 0; nothing but the report is left."""
    assert len(commands()) == 8
    line = commands()[number]
    what = re.findall(r"find (\w+)", line)[0]
    done = command(line, timeout_s=200)
    assert done.code == 0, f"{line}\n{done.text}"
    assert len(re.findall(PRINTED[what], done.out)) in ((1, 2) if what == "lr" else (1,)), done.out
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in left] == (["lr.html"] if what == "lr" else [])
    if what == "lr":
        assert "optimizer.lr=" in left[0].read_text().replace("<wbr>", "")  # where a line may break


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lrr conf=mlp", "'lrr' cannot be found. Did you mean 'lr'?"),
        (
            "lr conf=mlp min_lr=1 max_lr=0.1",
            "max_lr is 0.1, and min_lr is 1.0; the range must rise",
        ),
        ("lr conf=mlp min_lr=no", "min_lr is 'no'; it must be a number above 0, as 1e-3."),
        ("lr conf=mlp steps=3", "steps is '3'; it must be a whole number, 10 or more."),
        ("lr -m conf=mlp", "find takes one config: leave -m out."),
        ("batch conf=mlp memory_gb=0", "memory_gb is '0'; it must be a number above 0"),
        (
            "settings conf=mlp",
            (
                "One rank sends no gradients, so there are no settings to find. Start several:"
                " torchrun"
            ),
        ),
        ("workers conf=mlp steps=0", "steps is '0'; it must be a whole number, 1 or more."),
        ("batch conf=mlp", "memory_gb is missing: on the CPU"),
        ("lr conf=mlp optimizer.lrr=1", "optimizer.lrr"),
    ],
)
def test_mistakes_are_explained(words: str, message: str, command: Command) -> None:
    """Before anything is trained."""
    done = command(f"python -m trainkit find {words}", timeout_s=120)
    assert done.code == 2 and message in done.err, done.text
