"""Names of other trainers that trainkit lacks: an error says what to use here.

lightning.py      Lightning's, by where a user looks for them (docs/lightning.md)
transformers.py   settings of transformers' TrainingArguments (docs/migrate.md)
"""

from trainkit.extension import Extension

_LIGHTNING = "trainkit.extensions.names.lightning"
_TRANSFORMERS = "trainkit.extensions.names.transformers"

EXTENSION = Extension(
    name="names",
    summary="names of Lightning and transformers that trainkit lacks: an error says what to use",
    proven="each commit",
    advice={
        "Trainer": f"{_LIGHTNING}.TRAINER",
        "trainkit": f"{_LIGHTNING}.PACKAGE",
        "trainkit.callbacks": f"{_LIGHTNING}.CALLBACKS",
        "trainkit.loggers": f"{_LIGHTNING}.LOGGERS",
        "trainer": f"{_TRANSFORMERS}.TRAINING_ARGUMENTS",
        "config": f"{_TRANSFORMERS}.TRAINING_ARGUMENTS",
    },
)
