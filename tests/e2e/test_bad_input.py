"""Errors after the config: in the data, in the user's Task, on one rank only."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.launching import Command

TASK = """
import torch, trainkit
from torch.utils.data import DataLoader, TensorDataset
class Mine(trainkit.Task):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn({samples}, 3)), batch_size=2)
    {step}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
CONF = "defaults: [_base, _self_]\ntask: {_target_: mine.Mine}\ntrainer: {max_epochs: 1}\n"
GOOD = "def training_step(self, batch, batch_idx):\n        return self.net(batch[0]).pow(2).mean()"


def write_task(folder: Path, step: str = GOOD, samples: int = 8) -> None:
    """Put a user's own task and config into the folder."""
    (folder / "conf").mkdir()
    (folder / "conf" / "mine.yaml").write_text(CONF)
    (folder / "mine.py").write_text(TASK.format(step=step, samples=samples))


def write_images(folder: Path, classes: int = 2) -> Path:
    """Make a small image folder in ImageNet's layout."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in range(classes):
            place = folder / "images" / part / f"class{name}"
            place.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(
                    place / f"{i}.jpg"
                )
    return folder / "images"


FOLDER = (
    "python -m trainkit fit conf=resnet18 data=imagefolder data.root=images data.num_classes=2"
    " data.image_size=32 "
)
FOLDER += "data.batch_size=4 trainer.max_epochs=1 trainer.lr_warmup_epochs=0"


def test_a_users_own_task_and_config_are_found(command: Command, tmp_path: Path) -> None:
    """A config and a module in the current folder are found."""
    write_task(tmp_path)
    done = command("python -m trainkit fit conf=mine")
    assert done.code == 0, done.text
    assert "Mine, 4 parameters" in done.out


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("x = 1", "Mine has no training_step()"),
        (
            "def trainingstep(self, batch, batch_idx): return 1",
            "it has trainingstep(), which is spelt differently",
        ),
        (
            "def training_step(self, batch, batch_idx): return 3.0",
            "returned float; it must return the loss",
        ),
        (
            "def training_step(self, batch, batch_idx): return self.net(batch[0]).mean().detach()",
            "returned a loss without grad",
        ),
    ],
)
def test_a_wrong_task_is_refused(step: str, words: str, command: Command, tmp_path: Path) -> None:
    """A Task that cannot be trained is refused with the reason and without a traceback."""
    write_task(tmp_path, step)
    done = command("python -m trainkit fit conf=mine")
    assert done.code == 1
    assert words in done.err, done.text
    assert "Traceback" not in done.text


@pytest.mark.parallel
@pytest.mark.parametrize("launcher", ["horovodrun -np 2 python", "torchrun --nproc-per-node 2"])
def test_an_exception_on_one_rank_ends_the_job_and_is_shown(
    launcher: str, command: Command, tmp_path: Path
) -> None:
    """If rank 1 alone fails, the job ends and shows that rank's traceback."""
    step = "def training_step(self, batch, batch_idx):\n"
    step += "        if self.trainer.global_rank == 1: raise ValueError('the colour is wrong')\n"
    step += "        return self.net(batch[0]).pow(2).mean()"
    write_task(tmp_path, step)
    started = time.monotonic()
    done = command(f"{launcher} -m trainkit fit conf=mine", timeout_s=60)
    assert done.code != 0
    assert "Error on rank 1" in done.text, done.text
    assert "ValueError: the colour is wrong" in done.text
    assert "mine.py" in done.text
    assert time.monotonic() - started < 45


@pytest.mark.parallel
def test_fewer_samples_than_ranks_is_reported_once(command: Command, tmp_path: Path) -> None:
    """A data set smaller than the number of ranks is refused, by rank 0 alone."""
    write_task(tmp_path, samples=1)
    done = command("horovodrun -np 2 python -m trainkit fit conf=mine", timeout_s=60)
    assert done.code != 0
    assert done.text.count("has 1 samples for 2 ranks") == 1, done.text


def test_an_image_folder_is_trained_on(command: Command, tmp_path: Path) -> None:
    """data=imagefolder trains on JPEGs in ImageNet's layout, with loader workers."""
    write_images(tmp_path)
    done = command(FOLDER)
    assert done.code == 0, done.text
    assert "epoch 1/1" in done.out


def test_a_broken_image_is_named(command: Command, tmp_path: Path) -> None:
    """An image that cannot be decoded ends the run with the file's name,
    also from a worker process.
    """
    broken = write_images(tmp_path) / "train" / "class1" / "2.jpg"
    broken.write_bytes(b"no image at all")
    done = command(FOLDER)
    assert done.code == 1
    assert "images/train/class1/2.jpg cannot be decoded" in done.err, done.err
    assert "Traceback" not in done.err


def test_an_empty_class_folder_is_named(command: Command, tmp_path: Path) -> None:
    """A class without images is named."""
    for image in (write_images(tmp_path) / "train" / "class0").iterdir():
        image.unlink()
    done = command(FOLDER)
    assert done.code == 1
    assert "class0" in done.err, done.err
    assert len(done.err) < 600


def test_the_number_of_classes_is_compared(command: Command, tmp_path: Path) -> None:
    """If data.num_classes does not fit the folders, the error says what to set."""
    write_images(tmp_path, classes=3)
    done = command(FOLDER)
    assert done.code == 2
    assert "set data.num_classes=3" in done.err, done.err


def test_horovod_that_is_not_there_names_its_cure(command: Command) -> None:
    """engine=horovod without Horovod names the command that installs it."""
    code = "import importlib.util as u, sys; f = u.find_spec; "
    code += "u.find_spec = lambda n, *a: None if n == 'horovod' else f(n, *a); "
    code += (
        "from trainkit.cli.run import main; sys.exit(main('fit', ['conf=mlp', 'engine=horovod']))"
    )
    done = command(f'python -c "{code}"')
    assert done.code == 2
    assert "python -m trainkit horovod install" in done.err, done.err
