"""What pages say of settings in their text, beside the commands that run."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import torch

from tests.helpers.page_tests import DOCS
from tests.helpers.pages import ROOT, blocks, commands
from tests.helpers.threads import World
from tests.helpers.toy import quiet, weights
from trainkit.config.compose import run


def composed(line: str) -> dict[str, Any]:
    """Return the config of a page's `fit`, under any launcher."""
    jobs: list[Any] = []
    run("fit", shlex.split(line.partition(" fit ")[2]), True, jobs.append)
    config: dict[str, Any] = jobs[0].config
    return config


def test_the_readmes_settings_give_one_result_on_one_process_and_two(tmp_path: Path) -> None:
    """Those that its text names, with the Task and the data of its script."""
    text = (ROOT / "README.md").read_text()
    (quoted,) = re.findall(r"`(global_batch_size=[^`]*)`", text)
    (script,) = [block for block in blocks(ROOT / "README.md") if block.file == "mine.py"]
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(script.content, "mine.py", "exec"), names)
    settings = eval(f"dict({quoted})")
    begun = names["MyTask"](width=8)

    def fit(engine: Any) -> torch.Tensor:
        task = copy.deepcopy(begun)
        quiet(tmp_path, engine=engine, **settings).fit(task, datamodule=names["my_data"](128))
        return weights(task)

    (alone,), pair = World(1).run(fit), World(2).run(fit)
    assert not torch.equal(alone, weights(begun))
    for each in pair:
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-6)


def test_the_clusters_tutorial_keeps_the_batch_of_one_device() -> None:
    """`runs/same`, which it compares with `runs/one`, takes the same samples at the same rate."""
    page = list(commands(DOCS / "tutorial_cluster.md"))
    one, same = (
        next(line for line in page if f"run_dir=runs/{name}" in line) for name in ("one", "same")
    )
    batch_size = composed(one)["data"]["batch_size"]
    trainer = composed(same)["trainer"]
    assert (trainer["global_batch_size"], trainer["lr_scaling"]) == (batch_size, "none")
    assert batch_size == 2 * composed(same)["data"]["batch_size"]


def test_the_clusters_tutorial_names_one_length_of_the_warm_up() -> None:
    """Beside the config's own a second form would be an error."""
    text = (DOCS / "tutorial_cluster.md").read_text()
    (named,) = re.findall(r"`(trainer\.lr_warmup_\w+=\d+)`", text)
    trainer = composed(f"trainkit fit conf=mlp {named}")["trainer"]
    assert (trainer["lr_warmup_steps"], trainer["lr_warmup_epochs"]) == (50, None)
