"""Collects what a test of a classifier finds, on the device, and writes the page on rank 0."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.api.view import RunView
from trainkit.console import short
from trainkit.data.sample_names import class_names_of, file_of
from trainkit.extensions.reports.classification.facts import Classified, WorstSample

_BINS = 15
_WORST = 24
_LARGEST = 224


class ClassificationResults:
    """The counts of one rank's test. `add` never waits for the device; `leave_page` does."""

    def __init__(self) -> None:
        self._confusion: Tensor | None = None
        self._bins: Tensor | None = None
        self._worst: dict[str, Tensor] = {}

    def add(
        self, inputs: Tensor, logits_BC: Tensor, labels_B: Tensor, indices: Sequence[int] | None
    ) -> None:
        """Count a batch.

        Args:
            inputs: images [B, C, H, W] are shown if their loss is among the largest.
            logits_BC: of the classes.
            labels_B: class numbers.
            indices: of the samples in the data set, if known.
        """
        log_p_BC = logits_BC.detach().double().log_softmax(1)
        num_classes = logits_BC.shape[1]
        best_B, chosen_B = log_p_BC.max(1)
        pairs_B = labels_B * num_classes + chosen_B
        confusion = (
            torch.bincount(pairs_B, minlength=num_classes**2)
            .view(num_classes, num_classes)
            .double()
        )
        self._confusion = confusion if self._confusion is None else self._confusion + confusion
        confidence_B = best_B.exp()
        bin_B = (confidence_B * _BINS).long().clamp(max=_BINS - 1)
        columns_3B = torch.stack(
            [torch.ones_like(confidence_B), confidence_B, (chosen_B == labels_B).double()]
        )
        bins = torch.zeros(3, _BINS, dtype=torch.float64, device=logits_BC.device).index_add(
            1, bin_B, columns_3B
        )
        self._bins = bins if self._bins is None else self._bins + bins
        number_B = torch.arange(len(labels_B)) if indices is None else torch.tensor(indices)
        batch = {
            "loss": functional.nll_loss(log_p_BC, labels_B, reduction="none"),
            "label": labels_B,
            "chosen": chosen_B,
            "confidence": confidence_B,
            "number": (
                (number_B if indices is not None else -1 - number_B).to(
                    logits_BC.device, non_blocking=True
                )
            ),
        }
        if inputs.dim() == 4:
            batch["image"] = inputs.detach()
        held = {
            name: torch.cat([self._worst[name], value]) if self._worst else value
            for name, value in batch.items()
        }
        order = held["loss"].topk(min(_WORST, len(held["loss"]))).indices
        self._worst = {name: value[order] for name, value in held.items()}

    def over_ranks(self, trainer: RunView) -> Classified | None:
        """Return the results of all ranks; None if no rank has a sample. Call it on all ranks."""
        data = trainer.engine.data
        device = trainer.engine.device
        dataset = trainer.evaluator.dataset
        sizes = data.all_gather_object(0 if self._confusion is None else len(self._confusion))
        if not (num_classes := max(sizes)):
            return None
        confusion, bins = self._confusion, self._bins
        if confusion is None or bins is None:
            confusion = torch.zeros(num_classes, num_classes, dtype=torch.float64, device=device)
            bins = torch.zeros(3, _BINS, dtype=torch.float64, device=device)
        confusion, bins = data.all_reduce(confusion).cpu(), data.all_reduce(bins).cpu()
        gathered = data.all_gather_object((self._samples(dataset), class_names_of(dataset)))
        worst = sorted(
            (sample for own, _ in gathered for sample in own), key=lambda sample: -sample.loss
        )[:_WORST]
        names = next(
            (names for _, names in gathered if names is not None and len(names) == num_classes),
            None,
        )
        return Classified(
            names or [str(i) for i in range(num_classes)], confusion.numpy(), bins.numpy(), worst
        )

    def leave_page(self, trainer: RunView) -> None:
        """Write `<run_dir>/reports/test.html` on rank 0. Call it on all ranks."""
        results = self.over_ranks(trainer)
        if results is None or not trainer.is_global_zero or trainer.options.fast_dev_run:
            return
        # Late: a fit need not wait for plotly.
        from trainkit.extensions.reports.classification.page import write_classification_page  # noqa: PLC0415

        page = trainer.run_dir / "reports" / "test.html"
        write_classification_page(
            page, short(trainer.checkpoints.resumed_from or trainer.run_dir), results
        )
        trainer.say(f"page  {short(page)}")

    def _samples(self, dataset: Any) -> list[WorstSample]:
        if not self._worst:
            return []
        names = ("loss", "label", "chosen", "confidence", "number")
        rows = zip(*(self._worst[name].tolist() for name in names), strict=True)
        pictures = [png_of(image) for image in self._worst.get("image", ())] or [b""] * len(
            self._worst["loss"]
        )
        return [
            WorstSample(
                loss,
                label,
                chosen,
                confidence,
                _name(dataset, number),
                image,
            )
            for (loss, label, chosen, confidence, number), image in zip(rows, pictures, strict=True)
        ]


def _name(dataset: Any, number: int) -> str:
    return "" if number < 0 else file_of(dataset, number) or f"index {number}"


def png_of(image_CHW: Tensor) -> bytes:
    """Return an image as PNG: its values are stretched to the whole range,
    since its normalization is not known.
    """
    image = image_CHW.detach().float().cpu()
    image = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    if max(image.shape[1:]) > _LARGEST:
        scale = _LARGEST / max(image.shape[1:])
        image = functional.interpolate(
            image[None], scale_factor=scale, mode="bilinear", antialias=True
        )[0]
    low, high = image.min(), image.max()
    pixels_HWC = (
        ((image - low) / (high - low).clamp(min=1e-9) * 255)
        .round()
        .byte()
        .permute(1, 2, 0)
        .contiguous()
    )
    height, width, _ = pixels_HWC.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels_HWC)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
