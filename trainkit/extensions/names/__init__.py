"""Names of other trainers that trainkit lacks: an error says what to use here.

lightning.py      Lightning's, by where a user looks for them (docs/lightning.md)
transformers.py   settings of transformers' TrainingArguments (docs/migrate.md)
others.py         classes and calls of transformers' Trainer, Keras, Horovod, Accelerate and Ray
surroundings.py   what other libraries have set up around a fit, and trainkit does not read
unsaved.py        objects of a Task whose state no checkpoint holds
unwritable.py     weights and buffers that no checkpoint can hold
plateaus.py       schedulers that wait for a validation
checkpoint_names.py    attributes by which Lightning's ModelCheckpoint forms names
epoch_ends.py     what on_train_epoch_end comes too late for, and the epochs that lack it
lightning_configs.py   keys, classes and flags in configs of Lightning's users
"""

from trainkit.extension import Extension

_LIGHTNING = "trainkit.extensions.names.lightning"
_OTHERS = "trainkit.extensions.names.others"
_AROUND = "trainkit.extensions.names.surroundings"
_CONFIGS = "trainkit.extensions.names.lightning_configs"

EXTENSION = Extension(
    name="names",
    summary="names of other trainers that trainkit lacks: an error says what to use",
    proven="each commit",
    advice={
        "Trainer": f"{_OTHERS}.TRAINER",
        "trainkit": f"{_CONFIGS}.PACKAGE",
        "trainkit.callbacks": f"{_OTHERS}.CALLBACKS",
        "trainkit.loggers": f"{_LIGHTNING}.LOGGERS",
        "trainer": f"{_CONFIGS}.SETTING",
        "config": f"{_CONFIGS}.CONFIG",
        "an object of a config": f"{_CONFIGS}.OBJECT",
        "_target_": f"{_CONFIGS}.TARGETS",
        "flags": f"{_CONFIGS}.FLAGS",
        "modules": f"{_CONFIGS}.MODULES",
        "Trainer.fit": f"{_OTHERS}.FIT",
        "EarlyStopping": f"{_OTHERS}.EARLY_STOPPING",
        "callbacks.early_stopping": f"{_OTHERS}.EARLY_STOPPING",
        "Callback": f"{_OTHERS}.HOOKS",
        "Task": f"{_OTHERS}.HOOKS",
        "a method of a Task": f"{_LIGHTNING}.TASK_METHODS",
        "an optimizer's package": f"{_OTHERS}.OPTIMIZERS",
        "the data's class": f"{_OTHERS}.DATA",
        "RayData": f"{_OTHERS}.RAY_DATA",
        "RayReport": f"{_OTHERS}.REPORT",
        "TuneReport": f"{_OTHERS}.REPORT",
        "ModelCheckpoint": f"{_OTHERS}.MODEL_CHECKPOINT",
        "callbacks.checkpoint": f"{_OTHERS}.MODEL_CHECKPOINT",
        "an optimizer": f"{_LIGHTNING}.OPTIMIZER",
        "a checkpoint": f"{_LIGHTNING}.CHECKPOINT",
        "load_from_checkpoint": f"{_LIGHTNING}.LOAD_FROM_CHECKPOINT",
    },
    features=tuple(
        f"trainkit.extensions.names.{part}.of_stage" for part in ("epoch_ends", "unwritable")
    ),
    remarks=(
        *(
            f"{_AROUND}.{name}"
            for name in ("unread", "alone", "scaled_twice", "adasum_of_gradients")
        ),
        "trainkit.extensions.names.unsaved.unsaved",
        "trainkit.extensions.names.plateaus.waiting",
        "trainkit.extensions.names.checkpoint_names.unread",
    ),
)
