"""Training from tar files with WebDataset, as its documentation writes it:
every sample once, on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import trainkit
from tests.helpers.found import take_found
from tests.helpers.launching import Command

wds = pytest.importorskip("webdataset")
pytestmark = [  # it leaves its tar files to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four tar files with ten samples each."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        with wds.TarWriter(str(folder / f"train-{shard:06d}.tar")) as sink:
            for i in range(10):
                key = 10 * shard + i
                sink.write(
                    {"__key__": f"{key:04d}", "x.npy": np.full(3, key / 40, np.float32), "cls": key}
                )
    return sorted(map(str, folder.glob("*.tar")))


class Regression(trainkit.Task):
    """Keeps the numbers of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Note the samples."""
        x, number = batch
        self.seen += [(self.current_epoch, n) for n in number.tolist()]
        return ((self.layer(x).squeeze(1) - number / 40) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_of_the_shards_is_trained_on_once(
    workers: int, shards: list[str], tmp_path: Path
) -> None:
    """Also with loader workers, which have shards of their own."""
    dataset = wds.WebDataset(shards, shardshuffle=False).decode().to_tuple("x.npy", "cls")
    task = Regression()
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
    }
    trainer = trainkit.Trainer(max_epochs=2, run_dir=str(tmp_path), **quiet)
    trainer.fit(task, DataLoader(dataset, batch_size=4, num_workers=workers))
    assert sorted(task.seen) == [(epoch, number) for epoch in range(2) for number in range(40)]


SCRIPT = """
import glob, torch, trainkit, webdataset as wds
from tests.helpers.found import keep_found
from tests.ports.test_webdataset import Regression

dataset = wds.WebDataset(sorted(glob.glob("shards/*.tar")), shardshuffle=False).decode().to_tuple("x.npy", "cls")
task = Regression()
trainer = trainkit.Trainer(max_epochs=1, run_dir="run", logger=False)
trainer.fit(task, torch.utils.data.DataLoader(dataset, batch_size=4))
keep_found(trainer.global_rank, [number for _, number in task.seen])
"""


@pytest.mark.parallel
def test_two_ranks_share_the_shards(shards: list[str], command: Command, tmp_path: Path) -> None:
    """Each rank reads two of the four."""
    (tmp_path / "shards").symlink_to(Path(shards[0]).parent)
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command(f"env PYTHONPATH={Path(__file__).parents[2]} horovodrun -np 2 python train.py")
    assert done.code == 0, done.text
    lists = take_found(tmp_path)
    assert len(lists) == 2
    assert sorted(lists[0] + lists[1]) == [*range(40)]
    assert min(map(len, lists)) == 20
