"""What to write here for the keys, classes and flags in configs of Lightning's users: LightningCLI's
files, and those of Hydra that build Lightning's objects (docs/lightning.md, "Configs").
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from trainkit.extension import public_names
from trainkit.extensions.names import lightning
from trainkit.extensions.names.lightning import each
from trainkit.extensions.names.others import PACKAGE as _NAMES
from trainkit.extensions.names.others import SETTINGS

_ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
_MODULES = ("trainkit.callbacks", "trainkit.loggers", "trainkit")
_FILE = "docs/lightning.md, Configs, has such a file before and after."

CONFIG = SETTINGS | each(
    {
        "debug extras hparams_search local paths tags task_name": (
            "Leave it out. run_dir is the run's folder, logger and seed are keys at the top."
        ),
        "lr_scheduler scheduler": (
            "In its place: lr=NAME. Or Task.configure_optimizers returns torch's scheduler."
        ),
        "model": (
            "In its place: task. A Task is the model with its training_step:"
            " task: {_target_: my.Model, width: 64}."
        ),
        "seed_everything": "In its place: seed. The number alone.",
        "test train": (
            "In its place: the commands `fit`, `test` and `predict`. One config serves all."
        ),
    }
)

OBJECT = each(
    {
        "class_path init_args": (
            "LightningCLI's class_path is _target_ here, and what is in init_args stands beside it:"
            " {_target_: my.Model, width: 64}."
        )
    }
)

SETTING = {
    "_target_": "Leave it out: the Trainer is trainkit's, and the section has its arguments.",
} | SETTINGS

FLAGS = each(
    {
        "config": f"LightningCLI's --config is conf=NAME here, of a file conf/NAME.yaml: {_FILE}",
        "print_config": "In its place: --cfg job. It prints the config and stops.",
        "data model optimizer lr_scheduler": (
            "LightningCLI's class of a section is its _target_ here: task._target_=my.Model."
        ),
    }
)


MODULES = each(
    {
        "trainkit.accelerators trainkit.plugins trainkit.strategies": (
            "In its place: Trainer(engine=..., precision=...). The launcher decides where it runs."
        ),
        "trainkit.callbacks trainkit.loggers": (
            "Import from the package: from trainkit.callbacks import ModelCheckpoint, from"
            " trainkit.loggers import CSVLogger."
        ),
        "trainkit.core trainkit.demos trainkit.loops trainkit.overrides trainkit.pytorch": (
            "Import from trainkit itself: LightningModule is trainkit.Task, LightningDataModule"
            " trainkit.DataModule; Trainer, the callbacks and the loggers have their names"
            " (docs/lightning.md)."
        ),
        "trainkit.fabric": "In its place: trainkit.Loop. Your loop, with trainkit's engines.",
        "trainkit.profilers": (
            "Import from trainkit itself: from trainkit import SimpleProfiler, AdvancedProfiler,"
            " PyTorchProfiler."
        ),
        "trainkit.tuner": (
            "In its place: trainkit.find_lr, or `python -m trainkit find lr|batch conf=NAME`."
        ),
        "trainkit.utilities": (
            "Import from trainkit itself: from trainkit import rank_zero_only, seed_everything,"
            " CombinedLoader. What needs no Trainer, as types and move_data_to_device, keeps"
            " Lightning's import; but its rank_zero_info and rank_zero_warn know no rank of"
            " Horovod."
        ),
        "lightning pytorch_lightning": (
            "Import trainkit in its place: LightningModule is trainkit.Task, LightningDataModule is"
            " trainkit.DataModule, and most names are the same (docs/lightning.md)."
        ),
    }
)


# `from trainkit import utilities`
PACKAGE = _NAMES | {name.removeprefix("trainkit."): text for name, text in MODULES.items()}


class _Targets(Mapping[str, str]):
    """Explains each of Lightning's classes, by its full name."""

    def __getitem__(self, target: str) -> str:
        root, _, rest = target.partition(".")
        if root not in _ROOTS:
            raise KeyError(target)
        name = rest.rpartition(".")[2]
        for module in _MODULES:
            if name in public_names(module) or name in dir(importlib.import_module(module)):
                return f"In its place: {module}.{name}."
        return lightning.PACKAGE.get(
            name, "It builds Lightning's object, which trainkit's Trainer cannot use."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


TARGETS = _Targets()
