"""Freezing parts of a model: BaseFinetuning as a base class, BackboneFinetuning for the usual case.

The optimizer holds all parameters from the start, frozen ones too: those have no gradient, and
optimizers skip them. Thawing sets `requires_grad` and nothing else, so the epoch alone determines
which parameters are frozen. Where a callback adds groups to an optimizer instead, as in Lightning,
a checkpoint names them, and a resumed run adds them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import Fraction, NonNegativeInt, PositiveFloat, checked
from trainkit.console import info
from trainkit.errors import CheckpointError, ConfigError, TaskError, did_you_mean
from trainkit.optim.scheduler_state import of_torch, settings_of


class BaseFinetuning(Callback):
    """Override `freeze_before_training` and `finetune_function`;
    call `freeze` and `make_trainable` in them.
    """

    needs_of_engine = frozenset({"optimizer_groups"})
    _run: RunView
    _task: Task

    def __init__(self) -> None:
        self._next = 0  # the first epoch that finetune_function has not been called for
        # groups, in their order: optimizer, names of parameters, settings
        self._added: list[dict[str, Any]] = []

    def freeze_before_training(self, task: Task) -> None:
        """Freeze the parameters that the first epoch does not train."""

    def finetune_function(self, task: Task, epoch: int, optimizer: Optimizer) -> None:
        """Freeze or thaw at the start of `epoch`.
        A resumed run calls it for the earlier epochs too.
        """

    _factor = 1.0  # of the rates

    @staticmethod
    def freeze(modules: nn.Module | Iterable[nn.Module], train_bn: bool = True) -> None:
        """Freeze the parameters of modules and their submodules.

        Args:
            modules: one module or several.
            train_bn: keep training batch norms; false freezes their statistics too (puts them in
                eval mode).
        """
        for part in _parts(modules):
            trains = isinstance(part, _BatchNorm) and train_bn
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad_(trains)
            if isinstance(part, _BatchNorm):
                part.train(trains)

    @staticmethod
    def make_trainable(modules: nn.Module | Iterable[nn.Module]) -> None:
        """Train the parameters of modules and their submodules,
        and let batch norms update their statistics.
        """
        _train(_parts(modules))

    def unfreeze_and_add_param_group(
        self,
        modules: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Train modules from now on, as a new parameter group of an optimizer; call it in
        `finetune_function`.

        Args:
            modules: one module or several.
            optimizer: it has none of their parameters yet, or those that it has are left out.
            lr: the group's rate, scaled for the ranks as the optimizer's own. Default: the first
                group's present one, divided; schedulers and warm-up then move both alike.
            initial_denom_lr: the divisor of that default.
            train_bn: train batch norms too; false leaves them frozen.

        Raises:
            TaskError: the scheduler has limits for each group (CyclicLR, OneCycleLR).
        """
        parts = [part for part in _parts(modules) if train_bn or not isinstance(part, _BatchNorm)]
        _train(parts)
        there = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        new = [
            parameter
            for part in parts
            for parameter in part.parameters(recurse=False)
            if id(parameter) not in there
        ]
        if not new:
            return
        schedulers = list(of_torch(self._run.rates.schedules))
        _check_schedulers(optimizer, schedulers)
        settings: dict[str, Any] = {} if lr is None else {"lr": lr * self._factor}
        if lr is None:
            first = optimizer.param_groups[0]
            settings["lr"] = self._scheduled_rate(first) / initial_denom_lr
            if "initial_lr" in first and any(own.optimizer is optimizer for own in schedulers):
                settings["initial_lr"] = float(first["initial_lr"]) / initial_denom_lr
        optimizer.add_param_group({"params": new, **settings})

    def _scheduled_rate(self, group: dict[str, Any]) -> float:
        """Return a group's rate without warm-up, which multiplies the rates of all groups."""
        rates = self._run.rates
        scheduled = dict(zip(map(id, rates.groups), rates.unscaled(), strict=True))
        return scheduled[id(group)] * rates.factor

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Freeze before the engine collects the trained parameters:
        frozen gradients are not reduced.
        """
        if stage == "fit":
            self._next = 0
            self._added = []
            self._run = trainer
            self._task = task
            self.freeze_before_training(task)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups that were added to optimizers."""
        return {"added": self._added} if self._added else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add those groups again. Callbacks are restored before the optimizers, whose states have
        these groups.

        Raises:
            CheckpointError: the task has no such parameters.
        """
        parameters = dict(self._task.named_parameters())
        for group in state.get("added", []):
            if lacking := [name for name in group["names"] if name not in parameters]:
                raise CheckpointError(
                    f"The checkpoint's run added {lacking[0]} to an optimizer, and"
                    f" {type(self._task).__name__} has no such parameter: they do not fit."
                )
            settings = group["settings"] | {"lr": group["settings"]["lr"] * self._run.rates.factor}
            own = [parameters[name] for name in group["names"]]
            self._run.optimizers[group["optimizer"]].add_param_group({"params": own, **settings})
            self._added.append(group)
        self._run.rates.take_users()

    def on_train_epoch_start(self, trainer: RunView, task: Task) -> None:
        """Call `finetune_function` for this epoch and, after a resume, for the epochs before it.

        Raises:
            TaskError: a thawed parameter is in no optimizer.
        """
        self._factor = trainer.rates.factor
        frozen = [parameter for parameter in task.parameters() if not parameter.requires_grad]
        sizes = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        for epoch in range(self._next, trainer.current_epoch + 1):
            for optimizer in trainer.optimizers:
                self.finetune_function(task, epoch, optimizer)
        self._next = trainer.current_epoch + 1
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        added = len(self._added)
        for place, (optimizer, size) in enumerate(zip(trainer.optimizers, sizes, strict=True)):
            for group in optimizer.param_groups[size:]:
                own = [names[id(parameter)] for parameter in group["params"]]
                settings = settings_of(group, float(group["lr"]) / self._factor)
                self._added.append({"optimizer": place, "names": own, "settings": settings})
        if len(self._added) > added:  # warm-up is of this step's rate already
            trainer.rates.take_users()
            trainer.rates.apply(trainer.global_step - trainer.state.skipped_steps)
        _check_optimized(
            task, trainer.optimizers, [parameter for parameter in frozen if parameter.requires_grad]
        )


@checked
class BackboneFinetuning(BaseFinetuning):
    """Trains a backbone only from some epoch on (and the other parameters from the start).

    Args:
        unfreeze_backbone_at_epoch: number of epochs with a frozen backbone.
        backbone: the name of a module of the task, as "backbone" or "model.layer1", or a list of
            names.
        train_bn: train its batch norms from the start; false keeps them and their statistics frozen
            until then.
        backbone_initial_ratio_lr: its rate in its first epoch, as a fraction of its parameter
            groups' rate; 0.1 in Lightning. Below 1, the backbone needs groups of its own: decay_groups(self.backbone)
            + decay_groups(self.head), say.
        lr_growth: factor on that fraction for each later epoch, up to 1.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: NonNegativeInt = 10,
        backbone: str | list[str] = "backbone",
        train_bn: bool = True,
        backbone_initial_ratio_lr: Fraction = 1.0,
        lr_growth: PositiveFloat = 2.0,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.train_bn = train_bn
        self.backbone = [backbone] if isinstance(backbone, str) else list(backbone)
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.lr_growth = lr_growth

    def freeze_before_training(self, task: Task) -> None:
        self.freeze(self._modules(task), self.train_bn)

    def finetune_function(self, task: Task, epoch: int, optimizer: Optimizer) -> None:
        """Thaw the backbone in its epoch; keep its norms frozen until then."""
        if epoch == self.unfreeze_backbone_at_epoch:
            self.make_trainable(self._modules(task))
        elif epoch < self.unfreeze_backbone_at_epoch:
            self.freeze(self._modules(task), self.train_bn)

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Print what is frozen; fail now rather than at the thaw.

        Raises:
            TaskError: the backbone is in no optimizer, or a group that needs its own rate holds
                other parameters.
        """
        parameters = [
            parameter
            for part in _parts(self._modules(task))
            for parameter in part.parameters(recurse=False)
        ]
        _check_optimized(task, trainer.optimizers, parameters)
        if self.backbone_initial_ratio_lr < 1:
            _check_groups(trainer.optimizers, parameters)
        if trainer.is_global_zero and trainer.current_epoch < self.unfreeze_backbone_at_epoch:
            epochs = trainer.options.limits.max_epochs
            never = epochs is not None and self.unfreeze_backbone_at_epoch >= epochs
            until = (
                f"in all {epochs} epochs"
                if never
                else f"before epoch {self.unfreeze_backbone_at_epoch + 1}"
            )
            then = "" if never else f" {self._rate_in_words()}"
            info(f"Finetuning: {', '.join(self.backbone)} not trained {until}.{then}")

    def _rate_in_words(self) -> str:
        ratio = self.backbone_initial_ratio_lr
        text = f"Then at {ratio:g} of its groups' rate, times {self.lr_growth:g} each epoch."
        if ratio == 1:
            text = (
                "Then at its groups' rate, where Lightning begins at a tenth of it and doubles that"
                " each epoch: backbone_initial_ratio_lr=0.1 does the same."
            )
        if not self.train_bn:
            text += (
                " train_bn=False: its batch norms are frozen until then and trained from then on;"
                " in Lightning they are trained from the start, at the first group's rate."
            )
        return text

    def on_train_epoch_start(self, trainer: RunView, task: Task) -> None:
        """Thaw, and set the backbone's fraction of the rate."""
        super().on_train_epoch_start(trainer, task)
        epochs = trainer.current_epoch - self.unfreeze_backbone_at_epoch
        if self.backbone_initial_ratio_lr < 1 and epochs >= 0:
            own = {
                parameter
                for part in _parts(self._modules(task))
                for parameter in part.parameters(recurse=False)
            }
            share = min(1.0, self.backbone_initial_ratio_lr * self.lr_growth**epochs)
            rates = trainer.rates
            rates.set_shares(
                {
                    i: share
                    for i, group in enumerate(rates.groups)
                    if group["params"] and group["params"][0] in own
                },
                trainer.global_step - trainer.state.skipped_steps,
            )

    def _modules(self, task: Task) -> list[nn.Module]:
        known = dict(task.named_modules(remove_duplicate=False))
        for name in self.backbone:
            if name not in known or not name:
                raise ConfigError(_no_module(task, name, [n for n in known if n]))
        return [known[name] for name in self.backbone]


def _parts(modules: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    several = [modules] if isinstance(modules, nn.Module) else modules
    return [part for module in several for part in module.modules()]


def _train(parts: Iterable[nn.Module]) -> None:
    for part in parts:
        for parameter in part.parameters(recurse=False):
            parameter.requires_grad_(True)
        if isinstance(part, _BatchNorm):
            part.train()


def _no_module(task: Task, name: str, known: list[str]) -> str:
    owner = name.rpartition(".")[0]
    while owner and owner not in known:
        owner = owner.rpartition(".")[0]
    there = [n for n in known if n.rpartition(".")[0] == owner]
    inside = f"{type(task).__name__}{'.' * bool(owner)}{owner}"
    return (
        f"BackboneFinetuning.backbone is '{name}', which is no module of {type(task).__name__}."
        f"{did_you_mean(name, known)} In {inside} there are {', '.join(there) or 'none'}."
    )


def _check_optimized(
    task: Task, optimizers: Iterable[Optimizer], thawed: Iterable[nn.Parameter]
) -> None:
    lacking = set(thawed) - {
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    }
    names = [name for name, parameter in task.named_parameters() if parameter in lacking]
    if names:
        raise TaskError(
            f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)} would be trained after a"
            " thaw, but no optimizer has it. Give configure_optimizers' optimizer all parameters,"
            " frozen ones too (decay_groups(self) does); do not filter by requires_grad."
        )


def _check_schedulers(optimizer: Optimizer, schedulers: Iterable[LRScheduler]) -> None:
    for scheduler in schedulers:
        if scheduler.optimizer is optimizer and isinstance(scheduler, (CyclicLR, OneCycleLR)):
            raise TaskError(
                f"unfreeze_and_add_param_group: {type(scheduler).__name__} has limits for each"
                " group from its start, and a group that is added has none. Give"
                " configure_optimizers' optimizer all parameters, frozen ones too, and call"
                " make_trainable here; or use another scheduler."
            )


def _check_groups(optimizers: Iterable[Optimizer], backbone: Iterable[nn.Parameter]) -> None:
    own = set(backbone)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        inside = sum(parameter in own for parameter in group["params"])
        if 0 < inside < len(group["params"]):
            raise TaskError(
                "BackboneFinetuning.backbone_initial_ratio_lr gives the backbone a rate of its"
                f" own, but a group holds {inside} of its parameters and"
                f" {len(group['params']) - inside} others. Give it groups of its own in"
                " configure_optimizers: decay_groups(self.backbone) + decay_groups(self.head),"
                " say."
            )
