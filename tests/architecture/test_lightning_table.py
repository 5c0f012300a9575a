"""docs/lightning.md says of each of Lightning's names what it is here:
the table is compared with both.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainkit
from trainkit.api.lightning_arguments import TRAINER_TAKES
from trainkit.api.task import Task
from trainkit.extensions.names import lightning as advice
from trainkit.run.lightning_names import SETTINGS
from trainkit.run.run import Run

PAGE = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
SECTIONS = [
    "Trainer(...)",
    "Trainer",
    "LightningModule",
    "log",
    "LightningDataModule",
    "Callback",
    "Callbacks",
    "Loggers",
]


@pytest.fixture(scope="module")
def lightning() -> Any:
    """Lightning, which requirements-dev.txt installs."""
    pytest.importorskip("lightning")
    import lightning.pytorch

    return lightning.pytorch


def section(title: str) -> str:
    """Return the text under a heading."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def works(title: str) -> list[str]:
    """Return the names that the section lists as the same here."""
    (listed,) = re.findall(
        r"^Works: (.*?)\.(?:\n\n|\n?\Z)", section(title), re.DOTALL | re.MULTILINE
    )
    return re.findall(r"`(\w+)`", listed)


def rows(title: str) -> Iterator[tuple[list[str], str, str]]:
    """Yield the rows of the section's table: Lightning's names, ours, and the note."""
    for line in section(title).splitlines():
        if line.startswith("| `"):
            names, here, note = (cell.strip() for cell in line.strip("|").split(" | "))
            yield re.findall(r"`(\w+)`", names), here, note


def arguments(function: Any) -> set[str]:
    """Return a call's named arguments."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        n
        for n, p in inspect.signature(function).parameters.items()
        if n != "self" and p.kind not in kinds
    }


def public(cls: type) -> set[str]:
    """Return the public names that Lightning's own classes of a class define."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("lightning")]
    return {
        name
        for base in own
        for name in vars(base)
        if not name.startswith("_") and name == name.lower()
    }


def names_there(title: str, lightning: Any) -> set[str]:
    """Return Lightning's names of a section."""
    return {
        "Trainer(...)": lambda: arguments(lightning.Trainer),
        "Trainer": lambda: public(lightning.Trainer),
        "LightningModule": lambda: public(lightning.LightningModule),
        "log": lambda: arguments(lightning.LightningModule.log),
        "LightningDataModule": lambda: public(lightning.LightningDataModule),
        "Callback": lambda: public(lightning.Callback),
        "Callbacks": lambda: set(lightning.callbacks.__all__),
        "Loggers": lambda: set(lightning.loggers.__all__),
    }[title]()


def is_here(title: str, name: str) -> bool:
    """Return whether trainkit takes the name."""
    if title == "Trainer(...)":
        return name in arguments(trainkit.Trainer) or name in TRAINER_TAKES
    if title == "log":
        return name in arguments(Task.log) or name in ("enable_graph", "metric_attribute")
    if title in ("Callbacks", "Loggers"):
        return name in trainkit.__all__
    if title == "LightningModule":
        return hasattr(Task, name) and name not in advice.TASK_METHODS
    if title == "Trainer":
        run = {*dir(Run), *Run.__annotations__, *SETTINGS, "callback_metrics", "optimizers"}
        return hasattr(trainkit.Trainer, name) or name in run
    return hasattr(
        {"LightningDataModule": trainkit.DataModule, "Callback": trainkit.Callback}[title], name
    )


@pytest.mark.parametrize("title", SECTIONS)
def test_every_name_of_lightning_has_a_place(title: str, lightning: Any) -> None:
    """No name is left out, and none is invented."""
    listed = [*works(title), *(name for names, _, _ in rows(title) for name in names)]
    assert sorted(listed) == sorted(names_there(title, lightning))


@pytest.mark.parametrize("title", SECTIONS)
def test_what_works_is_here_and_what_does_not_is_not(title: str) -> None:
    """Of the same name; the other rows name a replacement that exists, or say why there is none."""
    assert [name for name in works(title) if not is_here(title, name)] == []
    for names, here, note in rows(title):
        assert [name for name in names if is_here(title, name)] == []
        assert note.endswith("."), names
        if here == "not here":
            continue
        for replacement in re.findall(r"`([^`]+)`", here):
            assert exists(replacement), f"{names}: {replacement}"


@pytest.mark.parametrize(
    ("title", "texts"),
    [
        ("Trainer", advice.TRAINER),
        ("Callbacks", advice.CALLBACKS),
        ("Loggers", advice.LOGGERS),
    ],
)
def test_errors_say_what_the_page_says(title: str, texts: dict[str, str]) -> None:
    """Of each name that is not here."""
    on_page = {
        name: note if here == "not here" else f"In its place: {here.replace('`', '')}. {note}"
        for names, here, note in rows(title)
        for name in names
    }
    assert texts == on_page


def exists(replacement: str) -> bool:
    """Return whether a replacement is there:
    `Class`, `Class.name`, `Class(argument=...)`, `trainer.name` or `key=value`.
    """
    match = re.fullmatch(r"(\w+)(?:\.(\w+))?(?:\((\w+)=.*\)|\(.*\))?", replacement)
    if match is None:
        return replacement.partition("=")[0] in ("engine", "init_weights")
    owner, attribute, argument = match.groups()
    holder: Any = Run if owner == "trainer" else getattr(trainkit, owner)
    known = {*dir(holder), *getattr(holder, "__annotations__", {})}
    if holder is Run:
        known |= set(re.findall(r"self\.(\w+)", inspect.getsource(Run.__init__)))
    found = holder if attribute is None else attribute in known
    return bool(found) and (
        argument is None
        or argument in arguments(holder if attribute is None else getattr(holder, attribute))
    )


def test_the_sections_are_those_of_the_page() -> None:
    """The page has no section that is not compared."""
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE)[: len(SECTIONS)] == SECTIONS
