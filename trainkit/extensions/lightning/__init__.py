"""Names of Lightning's that trainkit lacks: an error says what to use here (docs/lightning.md).

advice.py   the names, by where a user looks for them
"""

from trainkit.extension import Extension

_ADVICE = "trainkit.extensions.lightning.advice"

EXTENSION = Extension(
    name="lightning",
    summary="names of Lightning's that trainkit lacks: an error says what to use here",
    proven="each commit",
    advice={
        "Trainer": f"{_ADVICE}.TRAINER",
        "trainkit": f"{_ADVICE}.PACKAGE",
        "trainkit.callbacks": f"{_ADVICE}.CALLBACKS",
        "trainkit.loggers": f"{_ADVICE}.LOGGERS",
    },
)
