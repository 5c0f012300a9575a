"""callbacks=ema, swa: averages of the weights (docs/optimizers.md).

ema.py               EMA, which each update moves
callback.py          StochasticWeightAveraging, of the ends of the last epochs
weight_averaging.py  what both share: one average a fit, shown and hidden, in checkpoints
averaging.py         the average itself
norm_statistics.py   batch norm's means and variances for the averaged weights
"""

from trainkit.extension import Extension

_ROOM = "trainkit.extensions.swa"
_HOMES = {"EMA": f"{_ROOM}.ema.EMA"}
_HOMES["StochasticWeightAveraging"] = f"{_ROOM}.callback.StochasticWeightAveraging"

EXTENSION = Extension(
    name="swa",
    summary="callbacks=ema, swa: an average of the weights is validated, saved and left in the model",
    proven="each commit",
    targets=tuple(_HOMES.values()),
    names={f"trainkit.callbacks.{name}": home for name, home in _HOMES.items()}
    | {"trainkit.callbacks.averaging.ema.EMA": _HOMES["EMA"]},
)
