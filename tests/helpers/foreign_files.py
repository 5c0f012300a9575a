"""Files that others wrote: Lightning checkpoints, objects of any class, calls hidden in pickles."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Settings:
    """A class of the user's own, as hyper-parameters of a Lightning checkpoint are full of them."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.made.append(lr)

    def __setstate__(self, state: Any) -> None:
        self.made.append(state)

    made: list[Any] = []


class Attributes(dict[str, Any]):
    """A dict of a class of its own."""


class Names(list[str]):
    """A list of a class of its own."""


class Colour(enum.Enum):
    RED = 1


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __call__(self) -> None:
        """Pickle it as a function."""

    def __reduce__(self) -> Any:
        return self.call


def net(seed: int = 0) -> nn.Sequential:
    """Return a small model with a buffer of whole numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def lightning(model: nn.Module, **more: Any) -> dict[str, Any]:
    """Return the object that Lightning's Trainer.save_checkpoint passes to torch.save,
    with hyper-parameters of all kinds.
    """
    optimizer = torch.optim.Adam(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {
                "best_model_path": Path("a.ckpt"),
                "kth": collections.deque([1]),
            }
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
        "hparams_name": "kwargs",
        "hyper_parameters": Attributes(
            args=argparse.Namespace(lr=0.1, root=Path("data")),
            settings=Settings(0.1),
            loss=functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
            names=Names(["a", "b"]),
            colour=Colour.RED,
            both={Colour.RED: frozenset({1}), "counts": collections.defaultdict(int, a=1)},
        ),
        **more,
    }


def saved(tmp_path: Path, content: Any, name: str = "file.pt", **options: Any) -> str:
    """Save with torch.save and return the path."""
    torch.save(content, tmp_path / name, **options)
    return str(tmp_path / name)


def same(a: Any, b: Any) -> bool:
    """Return whether two state_dicts are equal, bit for bit."""
    return sorted(a) == sorted(b) and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )
