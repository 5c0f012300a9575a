"""Names of other trainers that trainkit lacks: an error says what to use here.

lightning.py      Lightning's, by where a user looks for them (docs/lightning.md)
transformers.py   settings of transformers' TrainingArguments (docs/migrate.md)
others.py         classes and calls of transformers' Trainer, Keras, Horovod and Accelerate
"""

from trainkit.extension import Extension

_LIGHTNING = "trainkit.extensions.names.lightning"
_OTHERS = "trainkit.extensions.names.others"

EXTENSION = Extension(
    name="names",
    summary="names of other trainers that trainkit lacks: an error says what to use",
    proven="each commit",
    advice={
        "Trainer": f"{_OTHERS}.TRAINER",
        "trainkit": f"{_OTHERS}.PACKAGE",
        "trainkit.callbacks": f"{_OTHERS}.CALLBACKS",
        "trainkit.loggers": f"{_LIGHTNING}.LOGGERS",
        "trainer": f"{_OTHERS}.SETTINGS",
        "config": f"{_OTHERS}.SETTINGS",
        "Trainer.fit": f"{_OTHERS}.FIT",
        "EarlyStopping": f"{_OTHERS}.EARLY_STOPPING",
        "callbacks.early_stopping": f"{_OTHERS}.EARLY_STOPPING",
        "Callback": f"{_OTHERS}.HOOKS",
        "Task": f"{_OTHERS}.HOOKS",
        "ModelCheckpoint": f"{_OTHERS}.MODEL_CHECKPOINT",
        "callbacks.checkpoint": f"{_OTHERS}.MODEL_CHECKPOINT",
    },
)
