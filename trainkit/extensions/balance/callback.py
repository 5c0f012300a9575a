"""Balance: measures each rank's speed and splits the samples of a step in proportion to it."""

from __future__ import annotations

import math

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView, step_clock_of
from trainkit.arguments import Fraction, NonNegativeFloat, PositiveInt, checked
from trainkit.callbacks.step_clock import Times
from trainkit.data.feed import MapFeed
from trainkit.data.plan import StepPlan
from trainkit.data.shares import Shares, format_shares, samples_of
from trainkit.errors import ConfigError
from trainkit.extensions.balance.paces import Pace, Proposal, propose

# after a change of shares: memory is allocated, kernels are chosen, torch.compile meets new shapes
_WARM_STEPS = 1


@checked
class Balance(Callback):
    """Splits the samples of each step in the shares that let all ranks compute equally long:
    `trainer.rank_shares`, measured.

    Each rank adds up the seconds of forward and backward by its own clock; waiting for other ranks
    is not part of them. If the measured paces promise more than `min_gain`, the shares
    change from the next step on. Gradient, order and global batch stay. A checkpoint holds the
    shares, and a run that resumes with this callback begins with them.

    Args:
        every_n_steps: steps between two looks. Default: at each epoch's last step.
        max_microbatch: samples of a rank's microbatch at most, as its memory allows: a number for
            all ranks, or one for each. null for no limit.
        min_gain: change the shares only if more than this share of samples per second is gained.
        damping: the part of the present shares that stays in a change, below 1: measured times vary.

    Attributes:
        changes: (step, samples of each rank in a round of microbatches) of each change of shares in
            this process.
    """

    config_key = "callbacks.balance"
    role = "shares"
    uses_step_clock = True
    needs_several_ranks = True

    def __init__(
        self,
        every_n_steps: PositiveInt | None = None,
        max_microbatch: PositiveInt | list[PositiveInt] | None = None,
        min_gain: NonNegativeFloat = 0.1,
        damping: Fraction = 0.25,
    ) -> None:
        if damping == 1:
            raise ConfigError(
                f"{self.config_key}.damping is {damping}; it must be below 1: at 1 no share would"
                " ever change."
            )
        self.every_n_steps = every_n_steps
        self.max_microbatch = max_microbatch
        self.min_gain = min_gain
        self.damping = damping
        self.changes: list[tuple[int, Shares]] = []
        self._from: Times | None = None  # the clock at the first measured step
        self._warm = 0
        self._samples = 0

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Check that ranks can be measured, and take unequal parts."""
        self._limits = _limits(trainer, self.max_microbatch)
        self._begin(_WARM_STEPS)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Count the coming step's samples of this rank."""
        if self._from is None:
            self._warm -= 1
            if self._warm >= 0:
                return
            self._from = step_clock_of(trainer).read()
        plan = _plan(trainer)
        step = trainer.state.step_in_epoch
        self._samples += sum(map(len, plan.microbatches(step, trainer.engine.ranks.data_rank)))

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        """Look before a validation within a step:
        a checkpoint that it leads to then holds the shares.
        """
        self._look_if_due(trainer)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        self._look_if_due(trainer)

    def _begin(self, warm_steps: int) -> None:
        self._from = None
        self._warm = warm_steps
        self._samples = 0

    def _look_if_due(self, trainer: RunView) -> None:
        if self._from is None:
            return
        if self.every_n_steps is not None:
            due = trainer.global_step % self.every_n_steps == 0
        else:
            due = trainer.state.step_in_epoch == trainer.train_feed.num_steps_in(
                trainer.current_epoch
            )
        if due:
            self._look(trainer, step_clock_of(trainer).read() - self._from)

    def _look(self, trainer: RunView, times: Times) -> None:
        compute = times.seconds["compute"]
        own = Pace(self._samples, compute, sum(times.seconds.values()) - compute)
        paces: list[Pace] = trainer.engine.data.all_gather_object(own)
        self._begin(0)
        if any(pace.samples == 0 or pace.compute_s <= 0 for pace in paces):
            return  # a rank had no sample in these steps
        now = _samples(_plan(trainer))
        proposed = propose(paces, now, self._limits, self.damping)
        if proposed.gain > self.min_gain and proposed.samples != now:
            self._change(trainer, paces, now, proposed)

    def _change(self, trainer: RunView, paces: list[Pace], now: Shares, proposed: Proposal) -> None:
        divisor = math.gcd(*proposed.samples)
        trainer.set_rank_shares([part // divisor for part in proposed.samples])
        self.changes.append((trainer.global_step, proposed.samples))
        self._begin(_WARM_STEPS)
        slow, fast = (
            choose(range(len(paces)), key=lambda rank: paces[rank].sample_s)
            for choose in (max, min)
        )
        trainer.say(
            f"Balance: after step {trainer.global_step} samples are split {format_shares(proposed.samples)}"
            f" ({format_shares(now)} before); a sample takes rank {slow}"
            f" {1000 * paces[slow].sample_s:.3g} ms and rank {fast}"
            f" {1000 * paces[fast].sample_s:.3g} ms; the best shares promise {100 * proposed.gain:.0f}"
            " % more samples per second."
        )


def _plan(trainer: RunView) -> StepPlan:
    assert isinstance(trainer.train_feed, MapFeed), "checked at the start"
    return trainer.train_feed.plan_of(trainer.current_epoch)


def _samples(plan: StepPlan) -> Shares:
    """Return the samples of each rank in a full round of microbatches."""
    return samples_of(plan.shares, plan.batch_size * plan.world_size, plan.world_size)


def _limits(trainer: RunView, given: int | list[int] | None) -> list[int]:
    """Return the largest microbatch of each rank.

    Raises:
        ConfigError: ranks cannot be measured or given unequal parts, or the limits do not fit.
    """
    key = Balance.config_key
    _check(trainer)
    now = _samples(_plan(trainer))
    ranks = trainer.engine.ranks.data_size
    if given is None:
        return [sum(now)] * ranks
    limits = [given] * ranks if isinstance(given, int) else list(given)
    if len(limits) != ranks:
        raise ConfigError(
            f"{key}.max_microbatch is {limits}, and there are {ranks} ranks; it must have a number"
            " for each."
        )
    if sum(limits) < sum(now):
        raise ConfigError(
            f"{key}.max_microbatch is {given}: {ranks} ranks take {sum(limits)} samples at a time"
            f" at most, but their microbatches have {sum(now)}. Raise it, or lower data.batch_size"
            " (the global batch stays with trainer.accumulate_grad_batches)."
        )
    for rank, (own, limit) in enumerate(zip(now, limits, strict=True)):
        if own > limit:
            raise ConfigError(
                f"{key}.max_microbatch is {given}, but rank {rank} begins with microbatches of"
                f" {own} samples. Raise it, lower data.batch_size, or begin with shares within it:"
                f" trainer.rank_shares={limits}."
            )
    return limits


def _check(trainer: RunView) -> None:
    key = Balance.config_key
    engine = trainer.engine
    measured = "how fast a rank computes cannot be seen"
    if trainer.elastic is not None:
        raise ConfigError(
            f"{key} is set, but the job is elastic: its ranks may change. Leave one of the two out."
        )
    if engine.needs_even_rounds:
        raise ConfigError(
            f"{key} is set, but under engine={engine.name} ranks wait for each other within forward"
            f" and backward, so {measured}. Use engine=ddp or horovod, or set trainer.rank_shares."
        )
    if trainer.options.numerics.sync_batchnorm:
        raise ConfigError(
            f"{key} is set, but with trainer.sync_batchnorm=true ranks wait for each other within"
            f" forward and backward, so {measured}. Leave one of the two out, or set"
            " trainer.rank_shares."
        )
    if not isinstance(trainer.train_feed, MapFeed):
        raise ConfigError(
            f"{key} is set, but the training data is a stream, whose batches each rank reads as"
            " they come. Use a dataset with a length, or leave it out."
        )
