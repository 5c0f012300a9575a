"""Images per second of data=imagefolder: read, decode, augment to 224 x 224, collate, deliver.

    python -m benchmarks.data [--short] [--json FILE]

On generated JPEGs of 500 x 375 pixels in the page cache; batches of 32, one thread for each
process. In turn:

    trainkit      recipes.imagefolder in a Trainer, with a model of one weight
    torchvision   the loader of torchvision's references/classification/train.py at its defaults: v1 transforms on PIL's images
    DALI          NVIDIA's readers.file, decoders.image_random_crop, resize, crop_mirror_normalize on the CPU, as its ResNet-50
                  example has them; threads in place of worker processes, one where the others have
                  no worker

A figure counts from one batch's arrival to another's; those at both ends are left out, so as many
batches are in flight at the window's end as at its beginning. The stall share is trainkit's own
figure (StepClock): the part of a step that ResNet-18 at 64 x 64 waits for its batch, while the
model and the workers share the machine's cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from benchmarks.harness import Cell, Findings, Table, Target, absent, main, median, median_ratio
from benchmarks.jpegs import CLASSES, make_jpegs
from benchmarks.processes import in_turns
from recipes.image_classifier import ImageClassifier
from recipes.imagefolder import ImageFolder
from recipes.photographs import MEAN, STD
from trainkit import Callback, Task, Trainer
from trainkit.api.view import step_clock_of
from trainkit.callbacks.step_clock import Times

sys.path.append(str(Path(sys.prefix, "dali")))  # installed there by `make peers`
SIZE, SMALL = 224, 64
OURS, REFERENCE, DALI = "trainkit", "torchvision", "DALI"
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}


class Arrivals(Callback):
    """Records the arrival of batches, and StepClock's values after a few steps and at the end."""

    uses_step_clock = True

    def __init__(self) -> None:
        self.times: list[float] = []
        self.clocks: list[Times] = []

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        """Note it."""
        self.times.append(time.perf_counter())
        if batch_idx == 4:
            self.clocks.append(step_clock_of(trainer).read())

    def on_train_end(self, trainer: Any, task: Any) -> None:
        """Read the clock."""
        self.clocks.append(step_clock_of(trainer).read())


class OneWeight(Task):
    """A model of negligible cost."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return something that has a gradient."""
        return self.weight * batch[0][:, 0, 0, 0].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(task: Task, root: Path, batch: int, workers: int, size: int) -> Arrivals:
    """Train an epoch and return the records."""
    data, seen = ImageFolder(str(root), batch, CLASSES, size, workers), Arrivals()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(max_epochs=1, engine="single", run_dir=folder, callbacks=[seen], **QUIET).fit(
            task, datamodule=data
        )
    return seen


def by_trainkit(root: Path, batch: int, workers: int) -> list[float]:
    """Return when batches came."""
    return fit(OneWeight(), root, batch, workers, SIZE).times


def by_torchvision(root: Path, batch: int, workers: int) -> list[float]:
    """Return when batches came; presets.py and train.py of the reference at their defaults."""
    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, antialias=True),
            transforms.RandomHorizontalFlip(0.5),
            transforms.PILToTensor(),
            transforms.ConvertImageDtype(torch.float),
            transforms.Normalize(MEAN, STD),
        ]
    )
    dataset = torchvision.datasets.ImageFolder(str(root / "train"), augment)
    sampler, pin = torch.utils.data.RandomSampler(dataset), torch.cuda.is_available()
    return list(
        arrivals(DataLoader(dataset, batch, sampler=sampler, num_workers=workers, pin_memory=pin))
    )


def by_dali(root: Path, batch: int, workers: int) -> list[float]:
    """Return when batches came; the pipeline of DALI's ResNet-50 example, on the CPU."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

    @pipeline_def(batch_size=batch, num_threads=max(1, workers), device_id=None, seed=0)
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=str(root / "train"), random_shuffle=True, name="Reader"
        )
        area, aspect = [0.08, 1.0], [3 / 4, 4 / 3]
        images = fn.decoders.image_random_crop(
            files, output_type=types.RGB, random_aspect_ratio=aspect, random_area=area
        )
        images = fn.resize(
            images, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_TRIANGULAR
        )
        mean, std = [255 * value for value in MEAN], [255 * value for value in STD]
        flip = fn.random.coin_flip(probability=0.5)
        return (
            fn.crop_mirror_normalize(
                images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std, mirror=flip
            ),
            labels,
        )

    loader = DALIClassificationIterator(
        [pipeline()], reader_name="Reader", last_batch_policy=LastBatchPolicy.PARTIAL
    )
    return list(arrivals((got[0]["data"], got[0]["label"].squeeze(-1).long()) for got in loader))


def arrivals(loader: Iterable[Any]) -> Iterator[float]:
    """Yield when each batch comes."""
    for _ in loader:
        yield time.perf_counter()


LOADERS: dict[str, Callable[[Path, int, int], list[float]]] = {
    OURS: by_trainkit,
    REFERENCE: by_torchvision,
    DALI: by_dali,
}


def seconds_of_image(times: list[float], batch: int, workers: int) -> list[float]:
    """Return the seconds of an image in the middle of an epoch."""
    ends = 2 * workers + 2  # batches in flight of a DataLoader, and one more
    first, last = times[ends], times[-1 - ends]
    return [(last - first) / (batch * (len(times) - 1 - 2 * ends))]


def stall_share(root: Path, batch: int, workers: int) -> list[float]:
    """Return the share of a step that ResNet-18 waits for data, and the step's milliseconds."""
    model = torchvision.models.resnet18(num_classes=CLASSES)
    task = ImageClassifier(model, lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9))
    early, late = fit(task, root, batch, workers, SMALL).clocks
    taken = late - early
    return [taken.seconds["data"] / sum(taken.seconds.values()), 1000 * taken.step_s]


def measure(short: bool) -> Findings:
    """Make the files, and measure with each number of workers."""
    torch.set_num_threads(1)
    rounds, images, links, batch = (0, 32, 2, 4) if short else (5, 256, 3, 32)
    findings = Findings(missing=absent({DALI: "nvidia"}) or absent({DALI: "nvidia.dali"}))
    findings.settings = {
        "batch": batch,
        "images": images * links,
        "rounds": rounds,
        "cores": len(os.sched_getaffinity(0)),
    }
    loaders = {name: loader for name, loader in LOADERS.items() if name not in findings.missing}
    rates = Table("data=imagefolder, images/s", ["", "workers", "images/s", "of torchvision's"], [])
    stalls = Table(
        "ResNet-18 at 64 x 64: waiting for data", ["workers", "% of a step", "a step, ms"], []
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_jpegs(root, images, links)
        for workers in (0, 2) if short else (0, 1, 2):
            taken = in_turns(
                {name: one(loader, root, batch, workers) for name, loader in loaders.items()},
                rounds,
                at_once=1,
            )
            rates.rows += rows_of(taken, workers)
            share, step_ms = stall_share(root, batch, workers)
            stalls.rows.append([workers, 100 * share, step_ms])
            ratio = 1 / median_ratio(taken[OURS], taken[REFERENCE])
            what = f"images/s with {workers} workers, of torchvision's reference"
            findings.targets.append(Target(what, ratio, 1.0, "times", "at least"))
    findings.tables = [rates, stalls]
    return findings


def one(
    loader: Callable[[Path, int, int], list[float]], root: Path, batch: int, workers: int
) -> Callable[[], list[float]]:
    """Return a function that runs a contender once."""
    return lambda: seconds_of_image(loader(root, batch, workers), batch, workers)


def rows_of(taken: Mapping[str, list[list[float]]], workers: int) -> list[list[Cell]]:
    """Return the table's rows."""
    return [
        [name, workers, 1 / median(seconds), 1 / median_ratio(seconds, taken[REFERENCE])]
        for name, seconds in taken.items()
    ]


if __name__ == "__main__":
    main(measure)
