"""Ray Data as training and validation data:
each sample once, in an order that resumes, on any number of ranks.
"""

from __future__ import annotations

import csv
import importlib
import json
import shutil
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from recipes.digits import Digits
from tests.helpers.launching import Command
from tests.ray.data_job import NUM_SAMPLES
from trainkit.extensions.ray.data import unseeded_step

Steps = dict[tuple[int, int], list[int]]  # (epoch, step) -> the samples of all ranks, sorted


def journal(folder: Path) -> Steps:
    """Return the samples of each step of one start of a job."""
    found: Steps = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            epoch, step, _, numbers = json.loads(line)
            found[epoch, step] = sorted(found.get((epoch, step), []) + numbers)
    return found


def result(text: str) -> dict[str, object]:
    """Return what rank 0 printed."""
    (line,) = [line for line in text.splitlines() if "RESULT" in line]
    found: dict[str, object] = json.loads(line.partition("RESULT ")[2])
    return found


def epoch_of(steps: Steps, epoch: int) -> list[int]:
    """Return all samples of an epoch, in the order of steps."""
    return [number for (e, _), numbers in sorted(steps.items()) if e == epoch for number in numbers]


@pytest.mark.parametrize("launcher", ["python", "horovodrun -np 2 python"])
def test_each_sample_counts_once_and_a_killed_run_resumes(
    launcher: str, cluster: str, command: Command, tmp_path: Path
) -> None:
    """61 of 61 samples in both epochs, each in another order; killed in the second epoch and
    resumed, a run reads the same samples in the same steps, and ends with the same weights."""
    start = f"{launcher} -m tests.ray.data_job {tmp_path}"
    whole = command(f"{start}/whole {tmp_path}/journal")
    assert whole.code == 0, whole.text
    steps = journal(tmp_path / "journal")
    for epoch in (0, 1):
        assert sorted(epoch_of(steps, epoch)) == list(range(NUM_SAMPLES))
    assert epoch_of(steps, 0) != epoch_of(steps, 1)
    assert result(whole.out)["val"] == 8.0  # the mean of 0 .. 16

    kill_at = len(steps) // 2 + 3
    assert command(f"{start}/again {tmp_path}/killed {kill_at}").code != 0
    resumed = command(f"{start}/again {tmp_path}/resumed")
    assert resumed.code == 0, resumed.text
    before, after = journal(tmp_path / "killed"), journal(tmp_path / "resumed")
    assert 0 < len(after) < len(steps) // 2
    assert {**before, **after} == steps
    assert result(resumed.out)["weights"] == result(whole.out)["weights"]


def write_digits(folder: Path) -> None:
    """Write the digits as Parquet: train/a.parquet and val/a.parquet, and train.parquet."""
    digits = Digits(image_size=8)
    digits.setup("fit")
    for name, part in (("train", digits.train), ("val", digits.val)):
        images, labels = (
            torch.stack(column) for column in zip(*(part[i] for i in range(len(part))), strict=True)
        )
        flat = pyarrow.array(images.flatten(1).tolist(), pyarrow.list_(pyarrow.float32()))
        (folder / name).mkdir(parents=True)
        parquet.write_table(
            pyarrow.table({"image": flat, "label": labels.numpy()}), folder / name / "a.parquet"
        )
    shutil.copy(folder / "train" / "a.parquet", folder / "train.parquet")


def test_files_by_config(cluster: str, command: Command, tmp_path: Path) -> None:
    """`data=ray` trains on Parquet files and validates on others;
    a folder that does not exist is named.
    """
    write_digits(tmp_path)
    own = "data=ray 'data.columns=[image,label]' data.num_classes=10 trainer.max_epochs=2"
    done = command(
        f"python -m trainkit fit conf=mlp {own} data.train=train data.val=val run_dir=run"
    )
    assert done.code == 0, done.text[-3000:]
    accuracies = [
        float(row["val/acc"])
        for row in csv.DictReader((tmp_path / "run/metrics.csv").open())
        if row["val/acc"]
    ]
    assert len(accuracies) == 2 and accuracies[-1] > 0.8
    lost = command(f"python -m trainkit fit conf=mlp {own} data.train=/no/such/folder run_dir=lost")
    assert lost.code == 1 and "/no/such/folder" in lost.err.splitlines()[-1]
    other = command(
        f"python -m trainkit fit conf=mlp {own} data.train=train data.reader=parket run_dir=lost"
    )
    assert other.code == 2 and "Did you mean 'parquet'?" in other.err


@pytest.mark.parametrize(
    "launcher", ["horovodrun -np 2", "torchrun --nproc-per-node 2 --no-python"]
)
def test_a_cluster_of_rank_0s_own_asks_for_its_token(
    launcher: str, command: Command, tmp_path: Path
) -> None:
    """With authentication as Ray ships it, which no variable here switches off:
    the other rank joins with the token.
    """
    write_digits(tmp_path)
    (tmp_path / "home").mkdir()
    start = f"env -u RAY_AUTH_MODE -u RAY_AUTH_TOKEN -u RAY_ADDRESS HOME={tmp_path}/home {launcher}"
    paths = f"data.train={tmp_path}/train data.val={tmp_path}/val"
    line = (
        f"{start} python -m trainkit fit conf=mlp data=ray {paths} 'data.columns=[image,label]'"
        " data.num_classes=10"
    )
    done = command(f"{line} trainer.max_steps=2 run_dir=run")
    assert done.code == 0, done.text
    assert (tmp_path / "home" / ".ray" / "auth_token").is_file()


def test_a_shuffle_without_a_seed_is_seen_in_rays_own_steps(cluster: str) -> None:
    """The names of a data set's steps are Ray's private ones."""
    ray_data = importlib.import_module("ray.data")
    rows = ray_data.range(8)
    assert unseeded_step(rows.random_shuffle().map(dict)) == "RandomShuffle"
    assert unseeded_step(rows.randomize_block_order()) == "RandomizeBlockOrder"
    assert unseeded_step(rows.random_shuffle(seed=3)) == ""
