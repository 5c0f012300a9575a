"""LoRA: small trained layers beside the frozen layers of any Task's model, by peft."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.api.callback import Callback
from trainkit.api.layers import OnMain
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import Fraction, PositiveFloat, PositiveInt, checked
from trainkit.console import info
from trainkit.device.shards import is_spread
from trainkit.errors import CheckpointError, ConfigError, TaskError, did_you_mean
from trainkit.extensions.adapters.base import (
    FINGERPRINT,
    AdaptersAlone,
    fingerprint_of,
    freeze_norms,
    moving_buffers,
)
from trainkit.extensions.adapters.quantized import quantized_layers
from trainkit.extensions.adapters.targets import check_names, check_replaced
from trainkit.extensions.finetuning.callbacks import BaseFinetuning
from trainkit.extensions.swa.callback import StochasticWeightAveraging
from trainkit.run.model import load_whole

_RENAMED = {
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "rank": "r",
    "lora_r": "r",
    "dora": "use_dora",
    "rslora": "use_rslora",
    "targets": "target_modules",
}


@checked
class LoRA(Callback):
    """Trains adapters of rank `r` beside frozen layers (Hu et al. 2021; with `use_dora` Liu et al.
    2024): W x becomes W x + lora_alpha / r * B A x, where A is drawn, and B begins at 0.

    The layers are those of peft, with its names and its first values. All other weights of the Task
    are frozen: they have no gradients, and nothing of them is summed over ranks. Batch norms use
    their statistics and do not update them, unless `modules_to_save` names them.

    A checkpoint holds the adapters, their optimizer's state, and a fingerprint of the frozen
    weights, but not these: each start makes them as the first did (`task.model`, `base`, the seed),
    and a run on others is refused. `python -m trainkit export` writes the merged model, or with
    format=peft the adapters.

    Args:
        target_modules: layers to adapt: "all-linear", a list of names or ends of names (as
            [q_proj, v_proj]), or a regular expression of whole names.
        r: the rank of the adapters.
        lora_alpha: their scale is lora_alpha / r, with `use_rslora` lora_alpha / sqrt(r).
        lora_dropout: probability of dropout on an adapter's input.
        use_dora: train the norms of the columns of W + BA too.
        use_rslora: see `lora_alpha`.
        modules_to_save: layers of which a copy is trained whole, as a new head: ends of names.
            Default: the head of a ForSequenceClassification of transformers, else none.
        exclude_modules: layers that `target_modules` would name too: names or ends of names.
        module: the module of the Task that is adapted, and that peft's folder is made for. Default:
            `model`, if it has layers, and all weights of the Task; else the Task.
        base: a file of weights, as of `init_weights`, which are loaded into the Task before each
            start; `init_weights` are adapters.
        strict: whether all weights of `base` must match.
    """

    role = "layers"
    config_key = "callbacks.lora"
    what_weights_are = (
        "With callbacks.lora these must be adapters; weights of the frozen layers are given as"
        " callbacks.lora.base=FILE."
    )
    explained_arguments = {  # noqa: RUF012 - never written to
        name: f"peft calls it {right}. Write {right}=..." for name, right in _RENAMED.items()
    }

    def __init__(
        self,
        target_modules: str | list[str],
        r: PositiveInt = 8,
        lora_alpha: PositiveFloat = 8,
        lora_dropout: Fraction = 0.0,
        use_dora: bool = False,
        use_rslora: bool = False,
        modules_to_save: list[str] | None = None,
        exclude_modules: list[str] | None = None,
        module: str | None = None,
        base: str | None = None,
        strict: bool = True,
    ) -> None:
        if importlib.util.find_spec("peft") is None:
            raise ConfigError("callbacks.lora needs peft. Install: pip install 'trainkit[peft]'")
        if base is None and not strict:
            raise ConfigError(
                "callbacks.lora.strict is false, and there is no callbacks.lora.base: it would have"
                " no effect. Leave it out."
            )
        self.target_modules = target_modules
        self.r = r
        self.lora_alpha = lora_alpha
        self.lora_dropout = lora_dropout
        self.use_dora = use_dora
        self.use_rslora = use_rslora
        self.modules_to_save = list(modules_to_save or [])
        self._names_copies = modules_to_save is not None
        self.exclude_modules = list(exclude_modules or [])
        self.module = module
        self.base = base
        self.strict = strict
        self._settings: dict[str, Any] = {
            "r": r,
            "lora_alpha": lora_alpha,
            "lora_dropout": lora_dropout,
            "use_dora": use_dora,
            "use_rslora": use_rslora,
            "target_modules": target_modules,
            "exclude_modules": self.exclude_modules or None,
        }
        self._model: Any = None  # peft's, around the Task's module
        self._fingerprint: list[int] = []
        self._state: Any = None  # an AdaptersAlone
        self._num_norms = 0  # frozen batch norms
        self._is_checked = False

    # -- the layers ---------------------------------------------------------------------------------

    def change_layers(self, task: Task, on_main: OnMain) -> None:
        """Load `base`, freeze the Task, and add the adapters; see api/layers.py.

        Raises:
            ConfigError: a name is that of no layer, or a layer cannot be adapted.
            CheckpointError: `base` cannot be read, or does not fit.
        """
        peft_models: Any = importlib.import_module("trainkit.extensions.adapters.peft_models")
        model = self._module_of(task)
        if peft_models.has_adapters(task):
            raise ConfigError(
                f"callbacks.lora would add adapters to {type(task).__name__}, which has some of peft"
                " already. Pass the model without them."
            )
        copied = self._copied(model, on_main)
        check_names(model, self.target_modules, self.exclude_modules, copied)
        if self.base is not None and quantized_layers(task):
            raise ConfigError(
                f"callbacks.lora.base is '{self.base}', and the model is loaded in 4 bits"
                " (task.quantization): weights must be there before. Give a folder of transformers,"
                " task.model=FOLDER."
            )
        if (base := self.base) is not None:
            for line in on_main(lambda: load_whole(task, base, self.strict)):
                info(f"LoRA, not of {base}: {line}")
        self._fingerprint = on_main(lambda: fingerprint_of(task))
        plain = dict(model.named_modules())
        trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        task.requires_grad_(False)
        try:
            self._model = peft_models.adapt(
                model, self._settings | {"modules_to_save": copied or None}
            )
            check_replaced(plain, peft_models.replaced(model))
        except ConfigError:
            if self._model is not None:
                peft_models.unload(self._model)
                self._model = None
            for parameter in trained:
                parameter.requires_grad_(True)
            raise
        copies = dict(peft_models.copies_of(task))
        norms = freeze_norms(task, copies.values())
        self._num_norms = len(norms)
        task.register_buffer(FINGERPRINT, torch.tensor(self._fingerprint, dtype=torch.uint8))
        names = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
        names |= {
            f"{prefix}.{name}"
            for prefix, copy in copies.items()
            for name, _ in copy.named_buffers(recurse=False)
        }
        self._state = AdaptersAlone(task, {*names, FINGERPRINT}, moving_buffers(task, norms))

    def _copied(self, model: nn.Module, on_main: OnMain) -> list[str]:
        """Return the layers that are trained whole. A classifier's head is new, as a rule: frozen it
        would stay random, and the adapters' folder would lack it.
        """
        is_classifier = type(model).__name__.endswith("ForSequenceClassification")
        base = getattr(model, "base_model_prefix", "")
        head = [
            name
            for name, part in model.named_children()
            if name != base and next(part.parameters(), None) is not None
        ]
        if self._names_copies or not is_classifier or not head:
            return self.modules_to_save
        on_main(
            lambda: info(
                f"LoRA: the head ({', '.join(head)}) is trained whole, as by peft's SEQ_CLS;"
                " callbacks.lora.modules_to_save=[] freezes it."
            )
        )
        return head

    def check_base(self, task: nn.Module) -> None:
        """Refuse adapters that were trained beside other weights.

        Raises:
            CheckpointError: the fingerprints differ.
        """
        if task.get_buffer(FINGERPRINT).tolist() != self._fingerprint:
            raise CheckpointError(
                "The checkpoint's adapters were trained beside other frozen weights than this"
                f" {type(task).__name__} has (callbacks.lora): they would answer something else."
                " Start from the same ones: the same task.model, callbacks.lora.base and seed, and"
                " the same version of torch if they are random."
            )

    def fold(self, task: Task) -> None:
        """Add the adapters to the frozen weights, and put the plain layers back; in float32, if
        the frozen weights have 4 bits.
        """
        peft_models: Any = importlib.import_module("trainkit.extensions.adapters.peft_models")
        self._refuse_parts(task)
        self._state.remove()
        delattr(task, FINGERPRINT)
        if quantized_layers(task):
            self._model = peft_models.dequantized(self._model)
        peft_models.merge(self._model)
        self._model = None
        task._layers_of = None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the adapters of the Task as peft does: `PeftModel.from_pretrained(base, folder)`.

        Raises:
            TaskError: there are none yet, or each rank holds a part of them.
        """
        peft_models: Any = importlib.import_module("trainkit.extensions.adapters.peft_models")
        if self._model is None:
            raise TaskError("LoRA has no adapters yet: fit a Task with this callback first.")
        self._refuse_parts(self._model)
        peft_models.save(self._model, Path(folder))

    def load_pretrained(self, folder: Path, task: Task) -> Callable[..., Any]:
        """Put a folder's adapters into a plain Task; return its forward, in eval mode."""
        peft_models: Any = importlib.import_module("trainkit.extensions.adapters.peft_models")
        peft_models.load(folder, self._module_of(task))
        return task.eval()

    def _refuse_parts(self, model: nn.Module) -> None:
        if any(is_spread(parameter) for parameter in model.parameters()):
            raise TaskError(
                "Each rank holds a part of the adapters. Export a checkpoint of the run: python -m"
                " trainkit export ckpt_path=last format=peft."
            )

    def _module_of(self, task: Task) -> nn.Module:
        known: dict[str, nn.Module] = dict(task.named_modules())
        if self.module is not None:
            if self.module not in known or not self.module:
                raise ConfigError(
                    f"callbacks.lora.module is '{self.module}', and {type(task).__name__} has no such"
                    f" module.{did_you_mean(self.module, [name for name in known if name])}"
                )
            return known[self.module]
        model = known.get("model")
        if model is None or not any(True for _ in model.children()):
            return task  # peft replaces layers of a model, not the model
        return model if len({*model.parameters()}) == len({*task.parameters()}) else task

    # -- the run ------------------------------------------------------------------------------------

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Refuse what does not go with frozen weights.

        Raises:
            ConfigError: another callback thaws layers, or the engine splits them in another way.
        """
        self._is_checked = False
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                raise ConfigError(
                    f"callbacks.lora freezes all weights, and {type(callback).__name__} would thaw"
                    " some, which no checkpoint of adapters holds. Leave one out;"
                    " callbacks.lora.modules_to_save=[NAME] trains a layer whole."
                )
        if trainer.engine.ranks.tensor_size > 1:
            raise ConfigError(
                f"engine.tensor is {trainer.engine.ranks.tensor_size}, and callbacks.lora replaces"
                " the layers whose width it would split. Leave engine.tensor out."
            )
        if trainer.engine.splits_weights and quantized_layers(task):
            raise ConfigError(
                f"engine={trainer.engine.name} splits weights over the ranks, and those of 4 bits"
                " (task.quantization) cannot be split. Use engine=ddp or engine=horovod, whose ranks"
                " hold them whole, or leave task.quantization out."
            )
        if trainer.engine.name == "deepspeed":
            raise ConfigError(
                "callbacks.lora has not been tried with engine=deepspeed. Use engine=fsdp, whose"
                " ranks hold parts of the weights too."
            )

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Check the base of the checkpoint, and what else changes weights.

        Raises:
            ConfigError: another callback would give frozen norms other statistics.
            TaskError: an adapter is in no optimizer.
        """
        self._check_once(task)
        averages = any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks)
        if averages and self._num_norms:
            raise ConfigError(
                f"callbacks.swa recomputes the statistics of batch norms, and {self._num_norms} of"
                f" {type(task).__name__} are frozen by callbacks.lora. Use callbacks=ema, or train"
                " the norms: callbacks.lora.modules_to_save=[NAME]."
            )
        optimized = {
            parameter
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in task.named_parameters():
            if parameter.requires_grad and parameter not in optimized:
                raise TaskError(
                    f"'{name}' of callbacks.lora would be trained, and no optimizer has it. Give"
                    " configure_optimizers' optimizer the Task's parameters as they are when it is"
                    " called (decay_groups(self), self.parameters())."
                )

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        self._check_once(task)

    def on_test_start(self, trainer: RunView, task: Task) -> None:
        self._check_once(task)

    def on_predict_start(self, trainer: RunView, task: Task) -> None:
        self._check_once(task)

    def _check_once(self, task: Task) -> None:
        if not self._is_checked:
            self.check_base(task)
            self._is_checked = True
