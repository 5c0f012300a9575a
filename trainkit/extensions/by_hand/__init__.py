"""trainkit.Loop, a training loop that the user writes, with all that a Trainer's fit has
(docs/tutorial_script.md); LambdaCallback and BasePredictionWriter.

loop.py               the Loop: each turn of the user's loop is a step of a fit
gradient_watch.py     gradients that the user's loop changes by itself
modes.py              whether gradients are recorded, in the fit and in the user's loop
task.py               the Task that the user's loop stands for; schedulers.py: the schedulers that it steps
lambda_callback.py    hooks as arguments
prediction_writer.py  a user's own way to write predictions
"""

from trainkit.extension import Extension

_LOOP = "trainkit.extensions.by_hand.loop.Loop"
_LAMBDA = "trainkit.extensions.by_hand.lambda_callback.LambdaCallback"
_WRITER = "trainkit.extensions.by_hand.prediction_writer.BasePredictionWriter"

EXTENSION = Extension(
    name="by_hand",
    summary=(
        "trainkit.Loop: a training loop of one's own, on any ranks and engine; LambdaCallback,"
        " BasePredictionWriter"
    ),
    proven="each commit",
    targets=(_LAMBDA,),
    names={
        "trainkit.Loop": _LOOP,
        "trainkit.callbacks.BasePredictionWriter": _WRITER,
        "trainkit.callbacks.prediction_writer.BasePredictionWriter": _WRITER,
        "trainkit.callbacks.LambdaCallback": _LAMBDA,
        "trainkit.callbacks.lambda_callback.LambdaCallback": _LAMBDA,
    },
)
