"""FaultInjection: provokes the faults of a cluster on purpose,
so that recovery can be tested on a laptop.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import checked
from trainkit.console import info, warning
from trainkit.errors import ConfigError, did_you_mean
from trainkit.safety.whole_files import replacing

DURING = ("step", "validation", "saving", "recovery")
_KEYS: dict[str, tuple[Any, Any]] = {  # key -> (what it must be, its default)
    "do": (str, None),
    "rank": (int, 0),
    "step": (int, None),
    "during": (str, "step"),
    "seconds": ((int, float), None),
    "host": (str, None),
    "hosts_file": (str, None),
    "of": (str, "weight"),
    "bit": (int, 20),
}
FLIPPED = ("activation", "gradient", "weight")
_NO_END_S = 1e9


@checked
class FaultInjection(Callback):
    """Injects faults, each once per run, however often the run restarts or its ranks change.

        callbacks.faults.faults='[{do: kill, rank: 1, step: 20}]'

    Each fault is a mapping:

        do          kill (SIGKILL), kill_loader (SIGKILL to a loader worker of the rank), terminate (SIGTERM, as a
                    scheduler does), stop (SIGSTOP: the process freezes), raise (an error in the user's code), hang
                    (the rank stops responding), slow (each batch takes `seconds` longer, from `step` on), nan (the
                    gradient of the first parameter is NaN in one step), flip (one bit, silently), cut_checkpoint
                    (the largest file of the newest checkpoint loses its second half), drop_host and add_host
                    (`host` leaves or joins `hosts_file`, which a discovery script prints)
        step        after this many optimizer steps
        rank        the rank, in the numbering at that time (default 0)
        during      "step" (default), "validation" (its second batch), "saving" (a checkpoint or a commit is being
                    collected), or "recovery" (a run is being restored); the first occurrence at
                    `step` or later
        seconds     of hang (default: no end) and slow (default 1)
        of          of flip: "weight" (default; once), or "activation" or "gradient" (of the first layer with weights, from
                    `step` on, as a damaged unit does)
        bit         of flip: its place in the element, from the lowest, 0 (default 20)

    Before a fault is injected, it is recorded in `<run_dir>/faults/`.

    Args:
        faults: the list of faults.
    """

    config_key = "callbacks.faults"
    needs_of_engine = frozenset({"weights", "layers"})

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        self.faults = [
            _read(fault, f"{self.config_key}.faults[{i}]") for i, fault in enumerate(faults)
        ]
        self._actions: dict[str, Callable[[dict[str, Any], RunView, Task], None]] = {
            "kill": lambda fault, *_: os.kill(os.getpid(), signal.SIGKILL),
            "kill_loader": _kill_loader,
            "terminate": lambda fault, *_: os.kill(os.getpid(), signal.SIGTERM),
            "stop": lambda fault, *_: os.kill(os.getpid(), signal.SIGSTOP),
            "raise": _raise,
            "hang": lambda fault, *_: time.sleep(fault["seconds"] or _NO_END_S),
            "nan": _poison,
            "flip": _flip,
            "cut_checkpoint": _cut,
            "drop_host": lambda fault, *_: _edit_hosts(fault, there=False),
            "add_host": lambda fault, *_: _edit_hosts(fault, there=True),
        }

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        self._inject("step", trainer, task)

    def on_before_backward(self, trainer: RunView, task: Task, loss: Any) -> None:
        """Delay the rank, for "slow"."""
        for fault in self.faults:
            if (
                fault["do"] == "slow"
                and fault["rank"] == trainer.global_rank
                and trainer.global_step >= fault["step"]
            ):
                time.sleep(1.0 if fault["seconds"] is None else fault["seconds"])

    def on_validation_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if batch_idx == 1 and not trainer.sanity_checking:
            self._inject("validation", trainer, task)

    def on_save_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        self._inject("saving", trainer, task)

    def on_load_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        self._inject("recovery", trainer, task, checkpoint["global_step"])

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Name the faults that did not come: a run that met none of them proves nothing."""
        if not trainer.is_global_zero:
            return
        for i, fault in enumerate(self.faults):
            if fault["do"] != "slow" and not (trainer.run_dir / "faults" / str(i)).exists():
                warning(
                    f"callbacks.faults.faults[{i}] did not come ({fault['do']} on rank"
                    f" {fault['rank']}): training ended at step {trainer.global_step}, with a world"
                    f" size of {trainer.world_size}. Name a step, a rank and a moment that the run"
                    " has."
                )

    def _inject(self, during: str, trainer: RunView, task: Task, step: int | None = None) -> None:
        step = trainer.global_step if step is None else step
        for i, fault in enumerate(self.faults):
            here = (
                fault["during"] == during
                and fault["rank"] == trainer.global_rank
                and fault["do"] != "slow"
            )
            if (
                here
                and step >= fault["step"]
                and self._is_first(trainer.run_dir / "faults" / str(i))
            ):
                text = (
                    f"FaultInjection: {fault['do']} on rank {trainer.global_rank} after step {step}"
                )
                info(text if during == "step" else f"{text}, during {during}")
                self._actions[fault["do"]](fault, trainer, task)

    @staticmethod
    def _is_first(mark: Path) -> bool:
        mark.parent.mkdir(exist_ok=True)
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _read(fault: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a fault with all keys, defaults filled in.

    Raises:
        ConfigError: it has an unknown key, lacks a required one, or has an illegal value.
    """
    if strange := [key for key in fault if key not in _KEYS]:
        raise ConfigError(
            f"{where} has the key '{strange[0]}'; use"
            f" {', '.join(_KEYS)}.{did_you_mean(strange[0], _KEYS)}"
        )
    if missing := [key for key in ("do", "step") if fault.get(key) is None]:
        raise ConfigError(
            f"{where} lacks '{missing[0]}'. A fault is, for example, {{do: kill, rank: 1, step:"
            " 20}."
        )
    if isinstance(fault.get("do"), float) and math.isnan(fault["do"]):
        fault = fault | {"do": "nan"}  # Hydra parses it as a number
    whole = {key: fault.get(key, default) for key, (_, default) in _KEYS.items()}
    for key, value in whole.items():
        kind = _KEYS[key][0]
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ConfigError(
                f"{where}.{key} is {value!r}; it must be {'a text' if kind is str else 'a number'}."
            )
        if isinstance(value, (int, float)) and value < 0:
            raise ConfigError(f"{where}.{key} is {value}; it must be 0 or more.")
    for key, legal in (("do", DEEDS), ("during", DURING), ("of", FLIPPED)):
        if whole[key] not in legal:
            raise ConfigError(
                f"{where}.{key} is '{whole[key]}'; it must be one of"
                f" {', '.join(legal)}.{did_you_mean(str(whole[key]), legal)}"
            )
    if whole["do"] in ("drop_host", "add_host") and not (whole["host"] and whole["hosts_file"]):
        raise ConfigError(
            f"{where} is a {whole['do']}: it needs 'host' and 'hosts_file', the file that the"
            " discovery script prints."
        )
    return whole


DEEDS = (
    "kill",
    "kill_loader",
    "terminate",
    "stop",
    "raise",
    "hang",
    "slow",
    "nan",
    "flip",
    "cut_checkpoint",
    "drop_host",
    "add_host",
)


def _kill_loader(fault: dict[str, Any], trainer: RunView, task: Task) -> None:
    """Kill a loader worker, as the system does with a process for which there is no memory."""
    workers = multiprocessing.active_children()
    if not workers:
        raise ConfigError(
            f"{FaultInjection.config_key}.faults: kill_loader on rank {trainer.global_rank}, which"
            " has no loader worker at that step. Set data.num_workers to 1 or more."
        )
    workers[0].kill()


def _raise(fault: dict[str, Any], trainer: RunView, task: Task) -> None:
    raise RuntimeError(
        f"FaultInjection raises this on rank {trainer.global_rank} after step"
        f" {trainer.global_step}."
    )


def _poison(fault: dict[str, Any], trainer: RunView, task: Task) -> None:
    """Fill the next gradient of the first trained parameter with NaN."""
    parameter = next(p for p in task.parameters() if p.requires_grad)

    def fill(grad: Tensor) -> Tensor:
        handle.remove()
        return torch.full_like(grad, float("nan"))

    handle = parameter.register_hook(fill)  # type: ignore[no-untyped-call]


def _flip(fault: dict[str, Any], trainer: RunView, task: Task) -> None:
    """Flip a bit of the first layer's weight, once, or of its outputs or gradients from now on."""
    name, layer = next(
        (name, module)
        for name, module in task.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    )
    parameter = next(p for p in layer.parameters(recurse=False) if p.requires_grad)
    if fault["bit"] >= 8 * parameter.element_size():
        raise ConfigError(
            f"{FaultInjection.config_key}.faults: bit is {fault['bit']}, and the elements of {name}"
            f" have {8 * parameter.element_size()} bits, from 0."
        )
    if fault["of"] == "weight":
        with torch.no_grad():
            parameter.copy_(flipped(parameter, fault["bit"]))
    elif fault["of"] == "gradient":
        parameter.register_hook(lambda grad: flipped(grad, fault["bit"]))
    else:
        layer.register_forward_hook(lambda _m, _in, output: _Flip.apply(output, fault["bit"]))


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """Return a copy of a tensor with one bit of its first element flipped."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = copy.view(-1).view(integers[tensor.element_size()])
    flat[0] ^= torch.ones((), dtype=flat.dtype, device=flat.device) << bit
    return copy


class _Flip(torch.autograd.Function):
    """Flips a bit in forward, and passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bit: int) -> Tensor:
        return flipped(tensor, bit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def _cut(fault: dict[str, Any], trainer: RunView, task: Task) -> None:
    """Truncate the largest file of the newest checkpoint to half its size."""
    trainer.checkpoints.wait()
    newest = (trainer.run_dir / "checkpoints" / "last").resolve()
    if not newest.is_dir():
        warning(f"FaultInjection: cut_checkpoint found no checkpoint in {newest.parent}.")
        return
    largest = max(
        (path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size
    )
    os.truncate(largest, largest.stat().st_size // 2)


def _edit_hosts(fault: dict[str, Any], there: bool) -> None:
    """Add a host ("name" or "name:slots") to the file, or remove it."""
    path = Path(fault["hosts_file"])
    host = fault["host"]
    others = [
        line
        for line in path.read_text().splitlines()
        if line.strip() and line.partition(":")[0] != host.partition(":")[0]
    ]
    with replacing(path) as draft:
        draft.write_text("".join(f"{line}\n" for line in [*others, *[host] * there]))
