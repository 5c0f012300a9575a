"""The tables of docs/migrate.md name what is there:
on their side in their library, on ours in trainkit.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.utils.data import distributed

import trainkit
from tests.helpers.pages import part
from trainkit.extensions.names.transformers import TRAINING_ARGUMENTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrate.md"
TABLES = {
    "Horovod's names": 12,
    "torchrun and DistributedDataParallel": 10,
    "Accelerate": 12,
    "Accelerate's config": 8,
    "Fabric": 10,
    "TrainingArguments": 12,
    "From timm's or torchvision's train.py": 12,
    "From Keras": 10,
    "From Composer": 12,
}
COMMANDS = {"horovodrun", "torchrun"}


def rows(heading: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the rows of the table below a heading: their names, and ours."""
    for line in part(PAGE, heading).splitlines():
        if line.startswith("| `"):
            theirs, ours, _ = (cell.strip() for cell in line.strip("|").split("|"))
            yield re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours) or [ours]


def is_here(name: str) -> bool:
    """Return whether a name of the table's second column exists in trainkit,
    its Trainer or its configs.
    """
    if name in COMMANDS or name == "not here":
        return True
    if "=" in name:
        group, _, option = name.partition("=")
        return (ROOT / "conf" / group / f"{option}.yaml").is_file()
    home, _, attribute = name.rpartition(".")
    if home == "trainkit":
        return attribute in trainkit.__all__
    if home == "Task":
        return hasattr(trainkit.Task, attribute)
    if home == "loop":
        return hasattr(trainkit.Loop, attribute) or f"self.{attribute}" in inspect.getsource(
            trainkit.Loop
        )
    if home == "trainer":
        settings = inspect.signature(trainkit.Trainer).parameters
        return attribute in settings or hasattr(trainkit.Trainer, attribute)
    if home == "engine":
        options = [importlib.import_module("trainkit.engine.horovod.engine").HorovodEngine.__init__]
        return any(attribute in inspect.signature(option).parameters for option in options)
    if home.partition(".")[0] in ("data", "optimizer", "task", "lr"):
        return any(
            re.search(rf"^\s*{attribute}:", path.read_text(), re.MULTILINE)
            for path in (ROOT / "conf").rglob("*.yaml")
        )
    return name in ("run_dir", "ckpt_path", "seed")


@pytest.mark.parametrize(("heading", "fewest"), TABLES.items())
def test_the_right_column_is_trainkits(heading: str, fewest: int) -> None:
    """A name that was renamed here is renamed there."""
    written = list(rows(heading))
    assert len(written) >= fewest
    assert [name for _, ours in written for name in ours if not is_here(name)] == []


def test_a_name_that_is_not_here_is_noticed() -> None:
    """The test above can fail."""
    others = [
        "trainkit.Nothing",
        "trainer.max_epoch",
        "engine.nothing",
        "callbacks=nothing",
        "loop.nothing",
        "Task.nothing",
        "task.nothing",
        "data.no",
    ]
    assert [name for name in others if is_here(name)] == []


def theirs(heading: str) -> list[str]:
    """Return the names of a table's left column."""
    return [name for names, _ in rows(heading) for name in names]


def arguments(*functions: Any) -> set[str]:
    """Return the names of their parameters."""
    return {name for function in functions for name in inspect.signature(function).parameters}


def test_the_left_column_is_horovods() -> None:
    """Functions of horovod.torch, and arguments of its DistributedOptimizer."""
    hvd = pytest.importorskip("horovod.torch")
    known = {f"hvd.{name}" for name in dir(hvd)} | arguments(hvd.DistributedOptimizer)
    assert [name for name in theirs("Horovod's names") if name not in known] == []


def test_the_left_column_is_fabrics() -> None:
    """Methods of Lightning's Fabric."""
    fabric = pytest.importorskip("lightning.fabric").Fabric
    known = {"Fabric"} | {f"fabric.{name}" for name in dir(fabric)}
    assert [name for name in theirs("Fabric") if name not in known] == []


def test_the_left_column_is_accelerates() -> None:
    """Methods of its Accelerator."""
    accelerator = pytest.importorskip("accelerate").Accelerator
    known = {"Accelerator", "accelerate launch"} | {
        f"accelerator.{name}" for name in dir(accelerator)
    }
    assert [name for name in theirs("Accelerate") if name not in known] == []


def test_the_left_column_is_accelerates_config() -> None:
    """Keys of the file that `accelerate config` writes."""
    written = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig
    known = written.__dataclass_fields__
    assert [name for name in theirs("Accelerate's config") if name not in known] == []


def test_the_left_column_is_transformers() -> None:
    """Arguments of its TrainingArguments."""
    transformers = pytest.importorskip("transformers")
    known = arguments(transformers.TrainingArguments)
    assert [name for name in theirs("TrainingArguments") if name not in known] == []


def test_the_left_column_is_torchs() -> None:
    """What scripts for torchrun call."""
    ddp, sampler = nn.parallel.DistributedDataParallel, distributed.DistributedSampler
    homes = (torch, torch.amp, nn, nn.utils, nn.parallel, torch.distributed, fsdp, distributed)
    known = {name for home in (*homes, ddp, sampler) for name in dir(home)}
    table = theirs("torchrun and DistributedDataParallel")
    assert [name for name in table if name not in known] == []


def test_the_left_column_is_composers() -> None:
    """What the conformance suite's program for Composer uses, which runs with it."""
    program = (ROOT / "benchmarks" / "conformance" / "trainers" / "composer_.py").read_text()
    assert [
        name for name in theirs("From Composer") if not re.search(rf"\b{name}\b", program)
    ] == []


def test_errors_say_what_the_page_says() -> None:
    """Of each setting of transformers: a user types it as trainer.NAME or NAME."""
    for theirs, ours in rows("TrainingArguments"):
        for name in theirs:
            text = TRAINING_ARGUMENTS[name]
            assert all(each in text for each in ours if each != "not here"), name
    assert len(TRAINING_ARGUMENTS) == sum(len(theirs) for theirs, _ in rows("TrainingArguments"))
