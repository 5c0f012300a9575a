"""Training from shards on an S3 server: the same samples on 1, 2 and 3 ranks, each once;
a killed run resumes bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.found import take_found
from tests.helpers.launching import Command
from tests.helpers.object_store import ObjectStore, serve, within
from tests.helpers.pictures import write_pictures
from trainkit.extensions.shards.packer import pack, plan_of
from trainkit.extensions.shards.store import ShardStore

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A server with shards of 48 and 8 images."""
    images = write_pictures(tmp_path_factory.mktemp("images"), 48, 8)
    with serve() as store, within(store.environment):
        for packing in plan_of(images, store.url, 10_000):
            pack(packing, ShardStore())
        yield store


SCRIPT = """
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import trainkit
from tests.helpers.found import keep_found
from tests.helpers.toy import Line
from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.dataset import ShardDataset
from trainkit.extensions.shards.index import find_index
from trainkit.extensions.shards.order import ShardOrder
from trainkit.extensions.shards.store import ShardStore


class Keys(Line):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, key = batch
        self.seen += [(self.current_epoch, self.global_step, k) for k in key.tolist()]
        return self.model(x).square().mean()


def decode(sample):
    key = int(sample.describe().rpartition("_")[2])
    return torch.full((3,), key / 48), key


index = find_index("s3://images/train", ShardStore())
cache = ShardCache(Path("cache"), 5 * max(shard.size for shard in index.shards), ShardStore())
order = ShardOrder(index, 2, ahead=lambda numbers: cache.fetch_ahead(index.shards[i] for i in numbers))
loader = DataLoader(ShardDataset(index, cache, decode), 2, sampler=order, num_workers=1)
task = Keys()
trainer = trainkit.Trainer(max_epochs=2, run_dir="run", logger=False, enable_checkpointing=False, global_batch_size=12)
trainer.fit(task, loader)
cache.close()
keep_found(trainer.global_rank, task.seen)
"""


@pytest.mark.parallel
def test_any_number_of_ranks_takes_the_same_steps(
    bucket: ObjectStore, command: Command, tmp_path: Path
) -> None:
    """On 1 rank, 2 under horovodrun and 3 under torchrun:
    each step has the same samples, and an epoch each of them once.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    lines = [
        "python train.py",
        "horovodrun --gloo -np 2 python train.py",
        "torchrun --nproc-per-node 3 train.py",
    ]
    steps = []
    for ranks, line in enumerate(lines, 1):
        done = command(f"env PYTHONPATH={ROOT} {line}")
        assert done.code == 0, done.text
        lists = take_found(tmp_path)
        assert len(lists) == ranks and all(len(found) == 96 // ranks for found in lists)
        steps.append(sorted(tuple(sample) for found in lists for sample in found))
    assert steps[0] == steps[1] == steps[2]
    assert [(epoch, key) for epoch, key in sorted((epoch, key) for epoch, _, key in steps[0])] == [
        (epoch, key) for epoch in range(2) for key in range(48)
    ]
    cached = [path.stat().st_size for path in (tmp_path / "cache").glob("*.tar")]
    assert 0 < len(cached) <= 5


@pytest.mark.parallel
def test_a_killed_run_resumes_bit_for_bit(bucket: ObjectStore, command: Command) -> None:
    """Two ranks, killed in the middle of an epoch, resume within it: weights, optimizer and metrics
    are those of a " "whole run."""
    done = command(
        "python -m trainkit check-resume conf=mlp trainer.lr_warmup_steps=null engine=ddp ranks=2"
        f" kill_at=5 save_at=4 steps=7 data=webdataset data.root={bucket.url} data.num_classes=4"
        " data.image_size=8 data.batch_size=3 data.num_workers=1 data.lanes=2"
        " data.shuffle_shards=1 data.cache_dir=cache data.cache_size_gb=0.0001"
        " trainer.max_epochs=2"
    )
    assert done.code == 0, done.text
    assert "equal" in done.out, done.text


def test_an_unreachable_store_ends_a_run_in_words(bucket: ObjectStore, command: Command) -> None:
    """Before training: one sentence, no traceback."""
    done = command(
        "python -m trainkit fit conf=mlp data=webdataset data.root=s3://images data.num_classes=4 "
        "+data.storage_options.config_kwargs.retries.max_attempts=0",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
    )
    assert done.code == 1
    assert done.err.startswith("Error: s3://images/train/index.json cannot be reached"), done.text
    assert "AWS_ENDPOINT_URL" in done.err and "Traceback" not in done.err
