"""Every command of this part of docs/data.md runs, made small, in the page's order, on an S3 server."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.test_imagenet_recipes import SMALL
from tests.helpers.launching import Command
from tests.helpers.object_store import serve
from tests.helpers.pages import part
from tests.helpers.pictures import write_pictures

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
TINY = "trainer.limit_val_batches=1 data.batch_size=6 data.num_workers=1 logger=csv "
DALI = Path(sys.prefix, "dali")  # `make peers` installs it there
# What each command prints, in the page's order; those above the first one set up a machine, and are
# not run.
PRINTED = {
    "data pack images": "s3://images/packed/train: 32 images of 4 classes in",
    "python -m trainkit fit conf=resnet50 data=webdataset data.root": "shuffle: ",
    "horovodrun -np 2": "in each of 2 lanes",
    "data check": "train: 32 samples read",
    "'data.urls=": "which is all of them: as good as a shuffle of all samples",
    "data.decode=dali": "decode=dali: crops and flips are those of decode=torchvision",
    "conf=resnet50_a3": "engine         ddp, 2 ranks",
    "conf=vit_b16": "EMA: validation",
}


def commands() -> list[str]:
    """Return the page's commands."""
    blocks = re.findall(
        r"```sh\n(.*?)```", part(PAGE, "Data at a cluster's scale"), flags=re.DOTALL
    )
    return [line for block in blocks for line in block.splitlines() if "trainkit " in line]


def small(line: str) -> str:
    """Return a command for few small images and a small model."""
    line = line.replace("shard_mb=256", "shard_mb=0.01").replace("-np 2", "--gloo -np 2")
    if "data pack" in line:
        return line
    recipe = next((name for name in SMALL if f"conf={name} " in line), None)
    if recipe is None:
        line = line.replace(
            "conf=resnet50", "conf=mlp trainer.lr_warmup_steps=null data.image_size=8"
        )
    else:
        line += f" {SMALL[recipe]} trainer.global_batch_size=12 data.image_size=32"
    return f"{line} {TINY}" + "trainer.max_steps=2" * (" fit " in line)


@pytest.mark.parallel
def test_the_pages_commands_run(command: Command, tmp_path: Path) -> None:
    """Each prints what the page says."""
    lines = commands()
    assert len(lines) == len(PRINTED)
    write_pictures(tmp_path / "images", size=40)
    has_dali = importlib.util.find_spec("nvidia.dali") is not None or DALI.is_dir()
    with serve() as store:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(DALI)]))
        environment = {
            **store.environment,
            "XDG_CACHE_HOME": str(tmp_path / "home"),
            "PYTHONPATH": path,
        }
        for line, (start, printed) in zip(lines, PRINTED.items(), strict=True):
            assert start in line
            if "dali" in line and not has_dali:
                continue
            done = command(small(line), timeout_s=200, **environment)
            assert done.code == 0, f"{small(line)}\n{done.text}"
            assert printed in done.text, f"{small(line)}\n{done.text}"
