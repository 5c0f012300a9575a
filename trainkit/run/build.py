"""FitSession: a fit from the start of the engine to its end.

build   feeds -> contract of batch and learning rate -> weights placed -> optimizers -> checkpoint, if asked ->
        rank 0's state to everyone -> each rank its own random numbers
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.callbacks.checkpoint import keepers
from trainkit.checkpoint import stateful
from trainkit.checkpoint.store import local_copy
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.data.feed import Feed, MapFeed, StreamFeed
from trainkit.data.loader import read_source
from trainkit.data.order import mix
from trainkit.device.sync_guard import SyncGuard
from trainkit.engine.sync_batchnorm import check_even, release
from trainkit.errors import ConfigError
from trainkit.loop import Run
from trainkit.optim.batch_plan import Contract, derive_accumulation, derive_warmup
from trainkit.optim.forms import read_optimizers
from trainkit.optim.fused import use_fused
from trainkit.optim.schedule import LearningRates
from trainkit.run import evaluation
from trainkit.run import feeds as assembly
from trainkit.run.elastic import ElasticSession
from trainkit.run.finite import FiniteLosses
from trainkit.run.folder import set_aside
from trainkit.run.oom import Halving
from trainkit.run.options import Limits
from trainkit.run.setup import seed_everything


class FitSession(ElasticSession):
    """A Session that trains; `run` and `contract` are there after `build`."""

    def __enter__(self) -> FitSession:
        super().__enter__()
        return self

    def __init__(self, *args: Any) -> None:
        """See Session."""
        super().__init__(*args)
        self.user_lrs: list[float] = []
        self.validation_names: set[str] = set()
        self._feed: Feed | None = None

    def build(
        self, train_data: Any, val_data: Any, ckpt_path: str | None, init_weights: str | None = None, strict: bool = True
    ) -> None:
        """Build what the loop works with, and put it where the checkpoint left it."""
        task, engine, settings = self.task, self.engine, self.settings
        data = assembly.find_data("train", train_data, task, self._datamodule)
        if data is None:
            raise ConfigError(
                "There is no training data: pass train_dataloaders or a datamodule, or give the task a train_dataloader()."
            )
        source = read_source(data, "train_dataloaders", training=True)
        batch_size = assembly.batch_size_of(data, source, engine)
        if engine.ranks.is_main and not self.writer.is_busy:  # a draft may be an earlier session's of this process
            for store in self.stores:
                self.try_files(store.tidy, f"{store.place} could not be tidied")
        assembly.place(task, engine, self.precision, self.channels_last)  # before weights are loaded: loading casts
        saved = self._find(ckpt_path)
        self.declared_ranks = declared = self._declared_ranks(saved)
        changes = derive_accumulation(batch_size, declared, settings.accumulate, settings.global_batch_size)
        if settings.overfit and source is not None:
            source = dataclasses.replace(source, shuffle=False, sampler=None)  # the same batches again and again
        feed = assembly.train_feed(
            data, source, changes, settings.train_limit, settings.seed, engine, self._move, settings.pad, declared
        )
        if isinstance(feed, StreamFeed) and declared != engine.ranks.world_size:
            self.tell(
                "The training data is a stream, of which each rank reads its own: for the "
                f"{changes[0][1]} microbatches of each of {declared} ranks a step takes {feed.accumulate_in(0)} of each of "
                f"{engine.ranks.world_size}, and of this epoch samples may be left out or come again."
            )
        self._feed = feed
        self._feeds.append(feed)
        val_feeds = self._val_feeds(val_data)
        interval = settings.limits.val_check_interval
        for epoch, _ in changes:
            steps = feed.num_steps_in(epoch)
            if val_feeds and interval and steps is not None and interval > steps:
                raise ConfigError(
                    f"trainer.val_check_interval is {interval}, but epoch {epoch} has {steps} steps: there would never be a "
                    "validation in it. Use a smaller one, or null for the epoch's end."
                )
        self.contract = Contract(
            batch_size,
            declared,
            changes[0][1],
            settings.lr_scaling,
            settings.lr_reference_batch_size,
            derive_warmup(settings.lr_warmup_steps, settings.lr_warmup_epochs, feed.num_steps_in),
            tuple(changes[1:]),
        )
        if settings.assert_no_sync and settings.compile and engine.device.type == "cpu":
            raise ConfigError(
                "trainer.assert_no_sync and trainer.compile are both set: on the CPU the calls are watched in a way that keeps "
                "torch.compile from compiling. Check without compile."
            )
        if settings.sync_batchnorm:
            self._synchronise_norms(feed)
        optimizers, schedules = read_optimizers(task.configure_optimizers())
        use_fused(optimizers)
        not_optimized = assembly.check_parameters(task, optimizers)
        task.zero_grad(set_to_none=True)  # what an earlier, broken-off run left would count as this one's
        rates = LearningRates(optimizers, schedules, self.contract, settings.lr_momentum_correction)
        self.user_lrs = rates.user_lrs
        self.run = Run(
            task=task,
            engine=engine,
            precision=self.precision,
            optimizers=optimizers,
            rates=rates,
            feed=feed,
            limits=settings.limits,
            state=self.state,
            hooks=self.hooks,
            pulse=self.check_pulse,
            validate=(lambda: self._validate(val_feeds)) if val_feeds else None,
            metrics=self.trainer.callback_metrics,
            not_optimized=not_optimized,
            sync_guard=SyncGuard(engine.device) if settings.assert_no_sync else contextlib.nullcontext(),
            finite=FiniteLosses(engine, feed, self.state) if settings.stop_on_nonfinite else None,
            halving=Halving(engine, self.tell) if settings.halve_batch_on_oom else None,
        )
        self.prog_bar_names = self.run.log.prog_bar
        seed_everything(mix(settings.seed, engine.ranks.rank))
        if saved is not None:
            self._put_back(saved)
        else:
            engine.comm.run_on_main(self._refuse_foreign)
            if engine.ranks.is_main:
                set_aside(self.run_dir)
            if init_weights is not None:
                self._begin_with(init_weights, strict)
        engine.prepare(task, optimizers)

    def _refuse_foreign(self) -> None:
        """A run from the start would replace and delete what another left in a folder that both were given."""
        for keeper in keepers(self.trainer.callbacks):
            if keeper.dirpath and (there := keeper.store.names()):
                shown = f"{', '.join(there[:3])}{', ...' * (len(there) > 3)}"
                raise ConfigError(
                    f"ModelCheckpoint.dirpath is '{keeper.dirpath}', which holds checkpoints of another run ({shown}). "
                    "Go on with them (ckpt_path=last, or resume=auto), or give another folder."
                )

    def _begin_with(self, weights: str, strict: bool) -> None:
        """Load weights from anywhere into the task, on rank 0; the others get them from there."""

        def read() -> list[str]:
            with local_copy(weights) as path:
                return load_into(self.task, read_weights(path), weights, strict)

        left = self.engine.comm.run_on_main(read)
        self.tell(f"Weights from {weights}" + (", without what does not fit:\n  " + "\n  ".join(left) if left else "") + ".")

    def _synchronise_norms(self, feed: Feed) -> None:
        if self.settings.halve_batch_on_oom and self.engine.ranks.world_size > 1:
            raise ConfigError(
                "trainer.sync_batchnorm and trainer.halve_batch_on_oom are both true: ranks that split a microbatch into more "
                "pieces than others would wait for them in batch norm. Leave one of the two out."
            )
        if self.engine.ranks.is_elastic and not self.engine.ranks.max_world_size:
            raise ConfigError(
                "trainer.sync_batchnorm is true in an elastic job without --max-np: a rank more than an epoch's last step has "
                "samples would end it. Say to how many ranks it may grow: --max-np N."
            )
        now, most = self.engine.ranks.world_size, self.engine.ranks.max_world_size
        for ranks in range(2 if self.engine.ranks.is_elastic else now, most + 1) if most > 1 else ():
            for epoch in (0, *(first for first, _ in self.contract.later)):
                try:
                    plan = feed.plan_of(epoch) if isinstance(feed, MapFeed) else None
                    check_even(None if plan is None else dataclasses.replace(plan, world_size=ranks))
                except ConfigError as error:
                    if ranks <= now:
                        raise
                    raise ConfigError(f"{error} Or keep this elastic job from growing so far: --max-np {ranks - 1}.") from None
        self.engine.convert_sync_batchnorm(self.task)
        self._stack.callback(release, self.task)

    def let_go(self) -> None:
        """See ElasticSession."""
        super().let_go()
        self._feed = None

    @property
    def num_training_steps(self) -> int | None:
        """Steps of the current epoch, where they are known."""
        return None if self._feed is None else self._feed.num_steps_in(self.state.current_epoch)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, where they are known."""
        return None if self._feed is None else planned_steps(self._feed, self.settings.limits, self.contract)

    def sanity_check(self) -> None:
        """Try a few validation batches before training, so that an error in validation does not cost an epoch."""
        limit = self.settings.num_sanity_val_steps
        if self.run.validate is None or limit == 0 or self.state.global_step:
            return
        self.hooks("on_sanity_check_start")
        self.state.stage = "sanity_check"
        feeds = self._val_feeds(None, limit)
        evaluation.evaluate("validation", self.task, feeds, self.engine, self.precision, self.hooks)
        self.hooks("on_validation_end")
        for feed in feeds:  # their workers need not live as long as the run
            self._feeds.remove(feed)
            feed.close()
        self.state.stage = "fit"
        self.hooks("on_sanity_check_end")

    def _val_feeds(self, given: Any, limit: int | None = None) -> list[Feed]:
        if limit is None:
            self._val_data = assembly.find_data("val", given, self.task, self._datamodule)
        return self._make_feeds(self._val_data, "val_dataloaders", self.settings.val_limit if limit is None else limit)

    def _validate(self, feeds: Sequence[Feed]) -> Mapping[str, float]:
        self.engine.comm.broadcast_tensors(self.task.buffers())  # rank 0's statistics are what is evaluated and saved
        self._part_before = stateful.own_part(self.run)  # a signal within it ends the run as of here
        self.pulse.quicken()
        self._count_batches(feeds)
        metrics, prog_bar = evaluation.evaluate(
            "validation", self.task, feeds, self.engine, self.precision, self.hooks, self.check_pulse
        )
        self._part_before = None
        self.pulse.quicken()
        self.prog_bar_names |= prog_bar
        self.num_validations += 1
        self.validation_names |= metrics.keys()
        self.trainer.callback_metrics.update(metrics)
        self.hooks("on_metrics", metrics, self.state.global_step)
        self.hooks("on_validation_end")
        return metrics

    @property
    def awaits_validation(self) -> bool:
        """Whether there is validation data and no validation has run yet."""
        return self.run.validate is not None and self.num_validations == 0


def planned_steps(feed: Feed, limits: Limits, contract: Contract) -> int | None:
    """Return the optimizer steps of the whole run, or None where nobody can know."""
    known = [] if limits.max_steps is None else [limits.max_steps]
    per_epoch = feed.num_steps_in(0)
    if limits.max_epochs is not None and per_epoch is not None:
        total, last = 0, limits.max_epochs
        for first, _ in reversed(((0, 0), *contract.later)):  # each stretch of epochs of one accumulation
            total += max(0, last - first) * (feed.num_steps_in(first) or 0)
            last = min(last, first)
        known.append(total)
    return min(known, default=None)
