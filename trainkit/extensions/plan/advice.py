"""Known ways to spoil a data-parallel run, checked before it starts.
Each sentence has value, reason, remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.data import TensorDataset

from trainkit.api.callback import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.data.feed import MapFeed
from trainkit.run.run import Run

_SMALL = 8
_RARELY_S = 50  # steps between two writes of rank 0 that do not slow the others
_RANK_KEYS = re.compile(
    r"^(global_|node_)?(rank|local_rank|world_size|num_nodes|num_gpus|n_gpus|gpus?|gpu_ids?|device_ids?|devices)$"
)
_GPU = re.compile(r"cuda:\d+")


def advise(
    run: Run, callbacks: Sequence[Callback], config: dict[str, Any], cores: int
) -> list[str]:
    """Return advice on a built fit with its resolved config, on hosts of `cores` cores."""
    return [
        *_batch(run),
        *_rate(run),
        *_loading(run, cores),
        *_writing(run, callbacks),
        *_config(config),
    ]


def _batch(run: Run) -> Iterator[str]:
    contract = run.batch_plan
    size = contract.batch_size
    ranks = contract.world_size
    if size is not None and size < _SMALL and ranks > 1:
        yield (
            f"data.batch_size is {size} for each rank: a microbatch below {_SMALL} leaves a GPU"
            " idle and gives the reduction little backward to hide behind. Use fewer ranks or a"
            " larger microbatch."
        )
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in run.task.modules())
    if (
        norms
        and size is not None
        and size < 2 * _SMALL
        and ranks > 1
        and not run.options.numerics.sync_batchnorm
    ):
        yield (
            f"The model has batch norm, and a rank sees {size} samples at a time: its statistics"
            " are noisy. Use trainer.sync_batchnorm=true, or a larger data.batch_size."
        )
    feed = run.train_feed
    if isinstance(feed, MapFeed):
        plan = feed.plan_of(0)
        if plan.num_steps < 10:
            yield (
                f"An epoch has {plan.num_steps} steps of {plan.global_batch_size} samples: few"
                " updates for so large a batch."
            )


def _rate(run: Run) -> Iterator[str]:
    contract = run.batch_plan
    names = {type(optimizer).__name__ for optimizer in run.optimizers}
    factor = contract.largest_factor
    if not_for_adaptive := contract.not_for_adaptive(names):
        yield not_for_adaptive
    if "LARS" in names and contract.lr_scaling == "linear" and factor > 1:
        yield (
            f"trainer.lr_scaling is linear and multiplies the rate of LARS by {factor:g}; its rates"
            " are for one batch size. Use trainer.lr_scaling=none, or set"
            " trainer.lr_reference_batch_size to the batch it was tuned for."
        )
    if too_long := contract.warmup_left(run.total_steps, run.rates.user_lrs):
        yield f"Warm-up: {too_long}"
    if factor > 4 and not contract.warmup_steps:
        yield (
            f"The learning rate is multiplied by {factor:g} without warm-up: large rates diverge in"
            " the first steps (Goyal et al. 2017, section 2.2). Set trainer.lr_warmup_epochs=5,"
            " say."
        )


def _loading(run: Run, cores: int) -> Iterator[str]:
    feed = run.train_feed
    ranks = run.engine.ranks.local_size
    if not isinstance(feed, MapFeed):
        return
    source = feed.source
    workers = int(source.options.get("num_workers") or 0)
    if workers == 0 and not isinstance(source.dataset, TensorDataset):
        yield (
            "The training data is loaded by the training process itself (num_workers=0): each step"
            f" waits for its samples. Set num_workers to {max(1, cores // ranks - 1)}, say"
            " (data.num_workers of the shipped data)."
        )
    elif workers and workers * ranks + ranks > cores:
        yield (
            f"{ranks} ranks of this host with {workers} loader workers each need"
            f" {workers * ranks + ranks} cores, and it has {cores}: they will slow each other down."
            f" Set num_workers to {max(0, cores // ranks - 1)} or less."
        )


def _writing(run: Run, callbacks: Sequence[Callback]) -> Iterator[str]:
    every = run.options.limits.log_every_n_steps
    if every < 5:
        yield (
            f"trainer.log_every_n_steps is {every}: rank 0 reads the device that often, and all"
            " ranks wait for it in the next reduction. Use 50."
        )
    for keeper in (c for c in callbacks if isinstance(c, ModelCheckpoint)):
        steps = keeper.every_n_train_steps
        if steps is not None and steps < _RARELY_S:
            yield (
                f"A checkpoint is written each {steps} steps, and each time all ranks wait until"
                " weights and optimizer state are copied. Write it each"
                f" {10 * _RARELY_S} steps, or by epochs."
            )


def _config(value: Any, key: str = "") -> Iterator[str]:
    """Find ranks, numbers of ranks and GPU numbers in a config: the launcher sets those."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, item in items:
        full = f"{key}.{name}" if key else str(name)
        number = isinstance(item, (int, list)) and not isinstance(item, bool) and item != []
        if number and _RANK_KEYS.search(str(name)) or isinstance(item, str) and _GPU.search(item):
            yield (
                f"{full} is {item}: a rank or a GPU's number in a config fits only one machine."
                " Leave it to the launcher."
            )
        yield from _config(item, full)
