"""trainkit.Loop, a training loop that the user writes, with all that a Trainer's fit has
(docs/tutorial_script.md); and LambdaCallback.

loop.py             the Loop: each turn of the user's loop is a step of a fit
task.py             the Task that the user's loop stands for; schedulers.py: the schedulers that it steps
lambda_callback.py  hooks as arguments
"""

from trainkit.extension import Extension

_LOOP = "trainkit.extensions.by_hand.loop.Loop"
_LAMBDA = "trainkit.extensions.by_hand.lambda_callback.LambdaCallback"

EXTENSION = Extension(
    name="by_hand",
    summary="trainkit.Loop: a training loop of one's own, on any ranks and engine; LambdaCallback",
    proven="each commit",
    targets=(_LAMBDA,),
    names={
        "trainkit.Loop": _LOOP,
        "trainkit.callbacks.LambdaCallback": _LAMBDA,
        "trainkit.callbacks.lambda_callback.LambdaCallback": _LAMBDA,
    },
)
