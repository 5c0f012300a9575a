"""DivergenceGuard: detects that ranks no longer hold the same model.

Every rank computes the same updates from the same reduced gradients. If a rank still gets other
bits (a damaged memory cell, a task that draws weights by rank, a nondeterministic operation), all
ranks keep training and nothing fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from trainkit.api.alerts import alert
from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveInt, checked
from trainkit.device.shards import is_spread
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError, DivergenceError

_SHOWN = 3
_ROW = 4096  # words of a row, of which sums are taken
_PART = " on"  # ends the name of a part of a tensor


@checked
class DivergenceGuard(Callback):
    """Compares hashes of the weights, buffers and optimizer state of all ranks.

    A hash is a sum over a tensor's bits on its device: a change of any one element changes it. Only
    the hashes are gathered (16 bytes per tensor), and the host waits only then. Batch norm's
    running statistics are left out if each rank has its own (without trainer.sync_batchnorm): they
    differ by design, and rank 0's are evaluated and saved.

    If ranks step alone (communication=diloco, local_sgd), what they share is compared: the weights
    of the last outer step and the outer momentum.

    A Trainer without it has `DivergenceGuard(every_n_steps=None, action="warn")`, which compares
    the parameters alone: ranks on processors of different kinds may compute other last bits, and do
    no harm.

    Args:
        every_n_steps: optimizer steps between two comparisons; null: parameters alone are compared,
            after the first step and before each validation.
        action: "stop" ends the run on all ranks; "repair" broadcasts rank 0's tensors, reports it
            and continues; "warn" reports it once.
    """

    config_key = "callbacks.divergence_guard"
    needs_several_ranks = True

    def __init__(
        self,
        every_n_steps: PositiveInt | None = 100,
        action: Literal["stop", "repair", "warn"] = "stop",
    ) -> None:
        self.every_n_steps = every_n_steps
        self.action = action
        self.needs_of_engine = (
            frozenset() if every_n_steps is None else frozenset({"optimizer_state"})
        )
        self.repairs = 0
        self._is_first = False
        self._has_warned = False

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Compare once before the first step: a difference at the start never vanishes."""
        if self.action == "repair" and trainer.engine.splits_weights:
            raise ConfigError(
                "callbacks.divergence_guard.action is 'repair', and the ranks of this engine hold"
                " parts of the weights: rank 0 could not send them its own. Use action=stop; the"
                " run then resumes from its last checkpoint."
            )
        self._is_first = True
        if self.every_n_steps is not None:
            self._compare(trainer, task)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        if (
            self._is_first
            if self.every_n_steps is None
            else trainer.global_step % self.every_n_steps == 0
        ):
            self._compare(trainer, task)
        self._is_first = False

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        if self.every_n_steps is None and not self._is_first and not trainer.sanity_checking:
            self._compare(trainer, task)

    def _compare(self, trainer: RunView, task: Task) -> None:
        engine = trainer.engine
        if self._has_warned:
            return
        shared = engine.approximation.shared_tensors()
        tensors: dict[str, Tensor] = dict(task.named_parameters())
        if engine.approximation.steps_alone:
            # the weights of the last outer step: own weights and optimizer state differ by design
            tensors = shared
        elif self.every_n_steps is not None:
            tensors = dict(_tensors(task, trainer.optimizers)) | shared
            for callback in trainer.callbacks:
                tensors |= callback.shared_tensors()
        is_quick = self.every_n_steps is None
        tensors = dict(_held(engine, tensors))
        found_here = [hash_of(tensor, is_quick).to(engine.device) for tensor in tensors.values()]
        hashes = torch.stack(found_here).tolist() if tensors else []
        ranks = engine.comm.all_gather_object(dict(zip(tensors, map(tuple, hashes), strict=True)))
        names = list(dict.fromkeys(name for rank in ranks for name in rank))
        # A part of a tensor, or of a pipeline stage, is compared by the ranks that hold it.
        has_stages = engine.ranks.pipeline_size > 1
        held = {
            name: [
                rank.get(name)
                for rank in ranks
                if name in rank or not (has_stages or name.endswith(_PART))
            ]
            for name in names
        }
        differences = [text for name, hashes in held.items() if (text := _difference(name, hashes))]
        if not differences:
            return
        more = f" (and {len(differences) - _SHOWN} more)" if len(differences) > _SHOWN else ""
        what = (
            f"At step {trainer.global_step} ranks no longer hold the same model:"
            f" {'; '.join(differences[:_SHOWN])}{more}."
        )
        if self.action == "stop":
            raise DivergenceError(
                f"{what} Look for work that differs by rank: weights drawn or changed by rank, a"
                " nondeterministic operation. The last checkpoint holds rank 0's weights;"
                " action=repair would continue with them."
            )
        if self.action == "warn":
            self._has_warned = True
            alert(
                trainer,
                "divergence",
                f"{what} Training continues, with gradients that are means over different models."
                " If that is not meant, look for work that differs by rank;"
                " callbacks=divergence_guard stops such a run, or repairs it.",
            )
            return
        # in one order on all ranks
        for name in sorted(name for name in tensors if all(name in rank for rank in ranks)):
            _send(engine, tensors[name])
        self.repairs += 1
        alert(
            trainer,
            "divergence",
            f"{what} Rank 0's tensors were sent to all ranks, and training continues.",
        )


def _held(engine: Engine, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank holds of each tensor, by a name that is that of the part."""
    for name, tensor in tensors.items():
        if tensor.is_meta:  # of another pipeline stage
            continue
        if not is_spread(tensor):
            yield name, tensor
        elif (piece := engine.piece_of(tensor)).local.numel():
            yield f"{name}, from {list(piece.at)}{_PART}", piece.local


def _send(engine: Engine, tensor: Tensor) -> None:
    if not tensor.is_sparse:
        engine.comm.broadcast_tensors([tensor])
        return
    dense = tensor.to_dense()
    engine.comm.broadcast_tensors([dense])
    tensor.copy_(dense.to_sparse(tensor.sparse_dim()))


def hash_of(tensor: Tensor, is_quick: bool = False) -> Tensor:
    """Return a hash of a tensor's bits: two sums of its 8-byte words, int64 of shape [2], on its
    device.

    Args:
        is_quick: leave out the second sum, which shows swapped words and takes twice as long.
    """
    if tensor.is_sparse:  # momentum of sparse gradients
        merged = tensor.detach().coalesce()
        return hash_of(merged.values(), is_quick) + hash_of(merged.indices(), is_quick) * 31
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8:
        flat = nn.functional.pad(flat, (0, -len(flat) % 8))  # whole, aligned words
    words = flat.view(torch.int64)
    if is_quick:
        return torch.stack([words.sum(), torch.zeros_like(words[:0].sum())])
    return _two_sums(words)


def _two_sums(words: Tensor) -> Tensor:
    """Return the sum of int64 numbers, and their sum weighted by place: 1, 3, 5, ...

    The plain sum changes with any single element; swaps show in the second. Both are modulo 2^64.
    """
    num_rows = len(words) // _ROW
    if not num_rows:
        return torch.stack([words.sum(), (words * _counted(len(words), words)).sum()])
    # The weight of a place is 1 + 2 column + 2 _ROW row: sums over rows and over columns are
    # enough, which saves a product with each element.
    table = words[: num_rows * _ROW].view(num_rows, _ROW)
    of_rows, of_columns = table.sum(1), table.sum(0)
    rest = words[num_rows * _ROW :]
    first = _two_sums(rest)
    rows = torch.arange(num_rows, device=words.device)
    plain = of_rows.sum()
    weighted = (of_columns * _counted(_ROW, words)).sum() + 2 * _ROW * (
        (of_rows * rows).sum() + num_rows * first[0]
    )
    return torch.stack([plain + first[0], weighted + first[1]])


def _counted(length: int, like: Tensor) -> Tensor:
    return 2 * torch.arange(length, device=like.device) + 1


def _tensors(task: Task, optimizers: object) -> Iterator[tuple[str, Tensor]]:
    own = {
        f"{name}.{part}"
        for name, module in task.named_modules()
        if _keeps_its_own(module)
        for part in module._buffers
    }
    yield from task.named_parameters()
    yield from (
        (name, buffer)
        for name, buffer in task.named_buffers()
        if name not in own and f".{name}" not in own
    )
    names = {parameter: name for name, parameter in task.named_parameters()}
    for optimizer in optimizers:  # type: ignore[attr-defined]
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield (
                        (
                            f"{names.get(parameter, 'parameter')}'s {key} in"
                            f" {type(optimizer).__name__}"
                        ),
                        value,
                    )


def _keeps_its_own(module: nn.Module) -> bool:
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_norm and not getattr(module, "shares_statistics", False)


def _difference(name: str, hashes: list[tuple[int, int] | None]) -> str | None:
    """Name the ranks that differ from the majority, or from rank 0 if there is no majority."""
    counts = Counter(hashes).most_common()
    if len(counts) == 1:
        return None
    usual = counts[0][0] if counts[0][1] > counts[1][1] else hashes[0]
    ranks = [str(rank) for rank, value in enumerate(hashes) if value != usual]
    return f"'{name}' of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
