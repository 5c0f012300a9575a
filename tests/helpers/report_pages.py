"""Writes each kind of page from small inputs of known content: what a browser is to show well.

Names are long where users' names are, and each page has a case with little to show.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers.recordings import ABOUT, PARTS, record
from trainkit.extensions.find.page import write_lr_page
from trainkit.extensions.reports.classification.facts import Classified, WorstSample
from trainkit.extensions.reports.classification.page import write_classification_page
from trainkit.extensions.reports.show.files import read_runs
from trainkit.extensions.reports.show.page import write_show_page
from trainkit.extensions.timeline.report.advice import Advice
from trainkit.extensions.timeline.report.page import write_timeline_page
from trainkit.extensions.timeline.report.steps import analyse
from trainkit.extensions.timeline.scaling.model import MeasuredRanks
from trainkit.extensions.timeline.scaling.model import fit as fit_models
from trainkit.extensions.timeline.scaling.page import write_scaling_page
from trainkit.extensions.timeline.traces.merge import read_recording

LAYER = "backbone.transformer.encoder.layers.{}.self_attention.out_projection.weight"
_GRADIENTS = {LAYER.format(i): 400_000 * (i + 1) for i in range(12)}


def write_pages(folder: Path) -> dict[str, Path]:
    """Write all pages into a folder; return them by name."""
    pages = {name: folder / f"{name}.html" for name in _WRITERS}
    for name, write in _WRITERS.items():
        write(pages[name], folder / name)
    return pages


def add_run(
    folder: Path,
    task: str = "ImageClassifier",
    settings: Mapping[str, object] | None = None,
    epochs: int = 6,
) -> Path:
    """Write what a run leaves: metrics, config, checkpoints of its last two epochs, progress."""
    (folder / "checkpoints").mkdir(parents=True)
    rows = ["epoch,step,train/loss_step,train/loss_epoch,val/loss,val/acc,lr,gradients/norm"]
    for step in range(1, 10 * epochs + 1):
        loss = 2.3 * math.exp(-step / (len(folder.name) + 4)) + 0.05 * math.sin(step)
        ends = f"{loss:.4f},{loss + 0.05:.4f},{1 - loss / 3:.4f}" if step % 10 == 0 else ",,"
        rate = f"{0.1 * (1 - step / 80):.5f},{1 + loss:.3f}"
        rows.append(f"{(step - 1) // 10},{step},{loss:.4f},{ends},{rate}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    own = {"task": {"_target_": f"recipes.{task}"}, "run_dir": str(folder), **(settings or {})}
    (folder / "config.yaml").write_text(json.dumps(own))
    for epoch in (epochs - 2, epochs - 1):
        saved = folder / "checkpoints" / f"epoch={epoch}-step={10 * epoch + 10}-val_loss=0.31"
        saved.mkdir()
        manifest = {
            "epoch": epoch,
            "global_step": 10 * epoch + 10,
            "metrics": {"val/loss": 0.3 + 0.01 * epoch, "val/acc": 0.9},
            "written": f"2026-02-03T04:0{epoch}:05+00:00",
            "contract": {"batch_size": 8, "world_size": 2, "accumulate": 1},
        }
        (saved / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _one_run(page: Path, folder: Path) -> None:
    write_show_page(page, read_runs([add_run(folder / "resnet50")]))


def _runs(page: Path, folder: Path) -> None:
    """Two runs of one task that differ in much, and between them one of another task."""
    sgd = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}, "seed": 3}
    adam = {
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.003},
        "callbacks": {"throughput": {"_target_": "trainkit.ThroughputMonitor", "window": 100}},
        "task": {"_target_": "recipes.ImageClassifier", "data_augmentation_probability": 0.25},
        "seed": 3.0,
    }
    folders = [
        add_run(folder / "resnet50-baseline", settings=sgd),
        add_run(folder / "language", task="LanguageModel", settings=sgd),
        add_run(folder / "resnet50-long-schedule", settings=adam, epochs=8),
    ]
    write_show_page(page, read_runs(folders))


def _run_without_values(page: Path, folder: Path) -> None:
    run = add_run(folder / "run")
    (run / "metrics.csv").write_text("epoch,step\n")
    write_show_page(page, read_runs([run]))


def _picture(seed: int) -> bytes:
    draw = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(file, "png")
    return file.getvalue()


def _classified(names: list[str], wrong: int) -> Classified:
    draw = np.random.default_rng(4)
    confusion = draw.integers(0, wrong, (len(names), len(names))).astype(np.float64)
    confusion += np.diag(np.arange(60, 60 + len(names)))
    counts = np.arange(15) * 10.0
    bins = np.stack([counts, counts * (np.arange(15) + 0.5) / 15, counts * np.arange(15) / 16])
    worst = [
        WorstSample(5.0 - i, i % 3, 2, 0.9 - i / 20, f"val/n0{i}/IMG_0000{i}.JPEG", _picture(i))
        for i in range(7 if wrong > 1 else 0)
    ]
    return Classified(names, confusion, bins, worst)


def _test(page: Path, folder: Path) -> None:
    names = ["aeroplane", "great_white_shark", "emu", "dog", "tench", "red fox", "ship", "truck"]
    write_classification_page(page, "runs/mine/checkpoints/best", _classified(names, 9))


def _test_without_a_mistake(page: Path, folder: Path) -> None:
    write_classification_page(page, "runs/mine", _classified(["cat", "dog"], 1))


def _timeline(page: Path, folder: Path) -> None:
    late = lambda rank, step: PARTS | ({"forward": 16.0} if rank == 1 else {})  # noqa: E731
    made = record(folder, ranks=2, steps=12, parts_of=late, gradients=_GRADIENTS)
    ranks = read_recording(made)
    advice = [Advice("HOROVOD_CYCLE_TIME=0.5", "the reductions wait for the next cycle", 0.12)]
    write_timeline_page(page, "runs/mine/timeline/steps-4-15", ranks, analyse(ranks), advice)


def _timeline_of_one_rank(page: Path, folder: Path) -> None:
    alone = lambda rank, step: PARTS | {"communication": 0.0}  # noqa: E731
    ranks = read_recording(
        record(folder, ranks=1, steps=8, parts_of=alone, about=replace(ABOUT, engine="single"))
    )
    write_timeline_page(page, "runs/mine/timeline/steps-0-7", ranks, analyse(ranks), [])


def _scaling(page: Path, folder: Path) -> None:
    measured = []
    for count in (1, 2, 4):
        parts = PARTS | {"communication": 0.0 if count == 1 else 4.0 + count}
        made = record(
            folder / str(count),
            ranks=count,
            steps=12,
            parts_of=lambda rank, step, parts=parts: parts,  # type: ignore[misc]
            about=replace(ABOUT, cycle_ms=0.0, engine="ddp" if count > 1 else "single"),
            gradients={"late": 8_000_000},
        )
        costs = [(size, 0.001 + size / 1e9) for size in (1e3, 1e5, 1e6, 1e7)]
        analysis = analyse(read_recording(made))
        measured.append(MeasuredRanks(count, analysis, costs if count > 1 else []))
    models = fit_models(measured)
    write_scaling_page(page, "conf=resnet50", measured, models, [10, 100], ["On the CPU."])


def _scaling_of_one_number(page: Path, folder: Path) -> None:
    made = record(folder, ranks=1, steps=8, about=replace(ABOUT, engine="single"))
    measured = [MeasuredRanks(1, analyse(read_recording(made)), [])]
    write_scaling_page(page, "conf=resnet50", measured, None, [], [])


def _rates(page: Path, folder: Path) -> None:
    lrs = [10 ** (i / 10 - 6) for i in range(60)]
    losses = [2.3 - 1.5 * i / 55 + 0.03 * math.sin(i) for i in range(59)] + [444.0]
    suggested = [
        ("steepest", 2e-3, "optimizer.lr=0.002"),
        ("valley", 1e-3, "optimizer.lr=0.001"),
    ]
    write_lr_page(page, "conf=resnet50", lrs, losses, losses, suggested, ["It rose at the end."])


def _no_rates(page: Path, folder: Path) -> None:
    flat = [2.3] * 20
    notes = ["The loss does not fall at any rate: there is nothing to suggest."]
    write_lr_page(page, "conf=mlp", [10 ** (i / 10 - 4) for i in range(20)], flat, flat, [], notes)


_WRITERS = {
    "run": _one_run,
    "runs": _runs,
    "run-without-values": _run_without_values,
    "test": _test,
    "test-without-a-mistake": _test_without_a_mistake,
    "timeline": _timeline,
    "timeline-of-one-rank": _timeline_of_one_rank,
    "scaling": _scaling,
    "scaling-of-one-number": _scaling_of_one_number,
    "rates": _rates,
    "no-rates": _no_rates,
}
