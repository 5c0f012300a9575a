"""The docs' tables of settings say what is so:
the settings exist, and an engine refuses what its column says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.compose import run
from trainkit.config.instantiate import build
from trainkit.engine.select import make_engine
from trainkit.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / f"{name}.md").read_text() for name in ("optimizers", "horovod"))
# A legal value for each option that stands in the table without one.
VALUES: dict[str, Any] = {
    "gradient_predivide_factor": 2.0,
    "num_groups": 2,
    "groups": [["model"]],
    "bucket_cap_mb": 5.0,
    "sparse_as_dense": True,
    "process_set": [0, 1],
    "fusion_threshold_mb": 64.0,
    "cycle_time_ms": 1.0,
    "cache_capacity": 10,
    "autotune": True,
    "autotune_log_file": "tuned.csv",
}


def rows(head: str) -> list[list[str]]:
    """Return the cells of the table whose head begins so."""
    table = PAGES[PAGES.index(f"| {head}") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def settings() -> list[str]:
    """Return what the two tables of settings tell to type."""
    cells = [row[0] for head in ("to optimise", "to find a fault") for row in rows(head)]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [
        code.replace("=...", "=0.5")
        for code in codes
        if "in the loader" not in code and code != "drop_last=True"
    ]


@pytest.mark.parametrize("typed", settings())
def test_a_setting_of_the_tables_is_one(typed: str, tmp_path: Path) -> None:
    """What a message says to type passes all checks and builds."""
    jobs: list[Any] = []
    run("fit", ["conf=mlp", f"run_dir={tmp_path}", *typed.split()], True, jobs.append)
    assert build(jobs[0].config, []).trainer is not None


def claims() -> list[tuple[str, Any, str, str]]:
    """Return (option, value, engine, what the table says) of each cell."""
    found = []
    for first, *cells in rows("option of `engine.`"):
        for option in re.findall(r"`([^`]+)`", first):
            name, _, value = option.partition("=")
            if name.startswith("trainer."):
                continue
            legal = VALUES.get(name, value)
            found += [
                (name, legal, engine, cell)
                for engine, cell in zip(("single", "horovod", "ddp"), cells, strict=True)
            ]
    return found


def test_the_table_is_seen() -> None:
    """All options of the engines stand in the table, on all engines."""
    assert len(claims()) == 3 * 16


@pytest.mark.parametrize(("option", "value", "engine", "said"), claims())
def test_an_engine_refuses_what_the_table_says(
    option: str, value: Any, engine: str, said: str
) -> None:
    """`refused` is refused when the engine is made, by its key; the rest is taken."""
    options = {option: value} | ({"autotune": True} if option == "autotune_log_file" else {})
    if said.startswith("refused"):
        with pytest.raises(ConfigError, match=rf"engine\.{option}"):
            make_engine(engine, **({option: value}))  # type: ignore[arg-type]
    elif value not in ("none", "average"):
        make_engine(engine, **options)  # type: ignore[arg-type]


def test_a_misspelt_option_of_another_engine_is_named(tmp_path: Path) -> None:
    """Alone too, where no engine has it, the name that was meant is named."""
    with pytest.raises(
        ConfigError, match=r"engine\.compresion is not a setting\. Did you mean 'compression'\?"
    ):
        run(
            "fit",
            ["conf=mlp", f"run_dir={tmp_path}", "engine.compresion=fp16"],
            True,
            lambda job: None,
        )
