"""What one step costs with what few use: gpu.py's part of checkpoints, capsules, loaders and norms."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.data import QUIET
from benchmarks.gpu_training import Model, forget, synchronize
from trainkit import Callback, CrashCapsule, ModelCheckpoint, Trainer
from trainkit.extensions.sync_batchnorm import layer as sync_batchnorm


class Clock(Callback):
    """Times the last two thirds of the steps."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self.device, self.first, self.last = device, steps // 3, steps
        self.ms = 0.0

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Start and stop the clock."""
        if trainer.global_step == self.first:
            self.begun = synchronize(self.device)
        if trainer.global_step == self.last:
            taken = synchronize(self.device) - self.begun
            self.ms = 1000 * taken / (self.last - self.first)


class OnHost(Dataset[Any]):
    """One image again and again, which a loader's workers copy into batches."""

    def __init__(self, model: Model, steps: int) -> None:
        self.image = torch.randn(3, model.image, model.image)
        self.count = model.batch * steps

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.image, index % 4


def costs(model: Model, device: torch.device, steps: int, workers: int) -> list[list[Any]]:
    """Return of each setting its name, ms a step, peak GB, and the error if there was one."""
    on_gpu = device.type == "cuda"
    still = [model.images(device)] * (steps + 1)
    never = 10**6
    files = {"enable_checkpointing": True}

    def loader(pinned: bool) -> DataLoader[Any]:
        return DataLoader(
            OnHost(model, steps + 1), model.batch, num_workers=workers, pin_memory=pinned and on_gpu
        )

    on_error = ModelCheckpoint(
        save_on_exception=True, every_n_epochs=None, every_n_train_steps=never
    )
    cases: list[tuple[str, Any, Sequence[Callback], dict[str, Any]]] = [
        ("on the device", still, [], {}),
        ("save_on_exception", still, [on_error], files),
        ("a checkpoint every 20 steps", still, [ModelCheckpoint(every_n_train_steps=20)], files),
        ("a crash capsule", still, [CrashCapsule()], {}),
        ("halve_batch_on_oom", still, [], {"halve_batch_on_oom": True}),
        ("a loader, pinned", loader(True), [], {}),
        ("a loader, not pinned", loader(False), [], {}),
    ]
    return [_cost(model, device, steps, *case) for case in cases]


def _cost(
    model: Model,
    device: torch.device,
    steps: int,
    name: str,
    data: Any,
    callbacks: Sequence[Callback],
    settings: dict[str, Any],
) -> list[Any]:
    forget(device)
    clock, error = Clock(device, steps), ""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_steps=steps,
            engine="single",
            precision="bf16-mixed",
            channels_last=True,
            callbacks=[*callbacks, clock],
            log_every_n_steps=10**6,
            run_dir=folder,
            **QUIET | settings,
        )
        try:
            trainer.fit(model.task(), data)
        except Exception as raised:  # the other settings are measured all the same
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    return [name, clock.ms or None, peak, error]


def norms(device: torch.device, shape: tuple[int, ...], repeats: int) -> list[list[Any]]:
    """Return ms of forward and backward of one BatchNorm2d in bfloat16, channels last, as torch has
    it and as sync_batchnorm has it, in each of its ways, without a sum over ranks.
    """
    images = torch.randn(shape, device=device, dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last).requires_grad_()
    plain = nn.BatchNorm2d(shape[1]).to(device)
    shared = nn.BatchNorm2d(shape[1]).to(device)
    sync_batchnorm.convert(shared, lambda tensor: tensor)
    rows = [["BatchNorm2d", _passes(plain, images, repeats), None, ""]]
    ways = {"its formulas": sync_batchnorm._Normalise}
    if device.type == "cuda":
        ways["torch's kernels"] = sync_batchnorm._ByKernels
    for name, way in ways.items():
        with mock.patch.object(sync_batchnorm, "_way_of", lambda tensor, way=way: way):
            rows.append([f"sync_batchnorm, by {name}", _passes(shared, images, repeats), None, ""])
    return rows


def _passes(layer: nn.Module, images: Tensor, repeats: int) -> float:
    """Return ms of a forward and backward, after as many that do not count."""
    begun = 0.0
    for number in range(2 * repeats):
        if number == repeats:
            begun = synchronize(images.device)
        layer(images).sum().backward()
    return 1000 * (synchronize(images.device) - begun) / repeats
