"""The reference of DPO: log-probabilities of preference pairs under the starting model.

They are computed once, before the first epoch, and held in the run's folder, as the starting model
is not: <run_dir>/reference/<digest of the pairs>.npy. A checkpoint holds the files' hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.dpo_data import Pairs
from trainkit.api.view import RunView
from trainkit.errors import CheckpointError, DataError
from trainkit.safety.whole_files import replacing

FOLDER = "reference"
Tables = dict[str, Tensor]  # digest of pairs -> [pairs, 2]: the chosen one, the rejected one


def compute(
    run: RunView, pairs: Pairs, batch_size: int, logps_of: Callable[[Sequence[int]], Tensor]
) -> Tensor:
    """Return the table of pairs on all ranks, of which each computes a part.

    Which pairs are computed together does not depend on ranks, so the bits do not either.

    Args:
        run: at its first weights.
        pairs: all are computed.
        batch_size: pairs at a time.
        logps_of: returns log-probabilities [B, 2] of the pairs at these places.
    """
    ranks, batches = run.engine.ranks, [*pairs.batches(batch_size)]
    table: Tensor | None = None
    for begin in range(0, len(batches), ranks.data_size):
        mine = begin + ranks.data_rank
        # a rank without one computes the last again: engines that split weights meet in each layer
        places = batches[min(mine, len(batches) - 1)]
        logps = logps_of(places)
        if table is None:
            table = logps.new_zeros(len(pairs), 2)
        if mine < len(batches):
            table[torch.tensor(places, device=table.device)] = logps
        run.engine.heartbeat.count_progress()
    assert table is not None  # there are pairs
    return run.engine.data.all_reduce(table).cpu()  # the others have zeros, so the sum is exact


def hashes_of(tables: Tables) -> dict[str, str]:
    """Return the hash of each table."""
    return {digest: _hash(table) for digest, table in tables.items()}


def save(folder: Path, tables: Tables) -> None:
    """Write a run's tables in place of an earlier start's."""
    folder.mkdir(exist_ok=True)
    for stale in folder.glob("*.npy"):
        stale.unlink()
    for digest, table in tables.items():
        with replacing(folder / f"{digest}.npy") as draft, draft.open("wb") as file:
            np.save(file, table.numpy())


def load(
    folder: Path, pairs: Sequence[Pairs], hashes: Mapping[str, str] | None, held: Tables
) -> Tables:
    """Return the tables of pairs.

    Args:
        folder: of the run.
        pairs: of training and of validation.
        hashes: those of the checkpoint that the fit resumes from; None to evaluate.
        held: tables of the same Task, which need not be read.

    Raises:
        CheckpointError: a table is not there, or is another one than the checkpoint's.
        DataError: the checkpoint's run had other pairs.
    """
    result = {}
    for each in pairs:
        path = folder / f"{each.digest}.npy"
        if hashes is not None and each.digest not in hashes:
            raise DataError(
                "The checkpoint's run had other pairs, or other tokens of them, and the starting"
                " model that they would be compared with is not there. Resume with the same"
                " data.file, data.val_file, data.tokenizer and data.max_length; or start a new run,"
                " whose reference is the trained model: init_weights=CHECKPOINT ckpt_path=null"
                " run_dir=NEW"
            )
        try:
            table = held.get(each.digest)
            if table is None:
                table = torch.from_numpy(np.load(path, allow_pickle=False))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}). It holds the log-probabilities of the pairs under"
                " the starting model, which training has replaced. Copy the folder"
                f" {FOLDER} of the run that the checkpoint is of into run_dir={folder.parent}; pairs"
                " that were not in that run cannot be evaluated."
            ) from error
        if hashes is not None and _hash(table) != hashes[each.digest]:
            raise CheckpointError(
                f"{path} belongs to another start than the checkpoint: their starting models differ."
                f" Copy the folder {FOLDER} of the checkpoint's run into run_dir={folder.parent}."
            )
        result[each.digest] = table
    return result


def _hash(table: Tensor) -> str:
    return hashlib.sha256(table.numpy().tobytes()).hexdigest()
