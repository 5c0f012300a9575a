"""callbacks=swa: the average of the weights at the ends of the last epochs (docs/optimizers.md).

callback.py         StochasticWeightAveraging
norm_statistics.py  batch norm's means and variances for the averaged weights
"""

from trainkit.extension import Extension

_SWA = "trainkit.extensions.swa.callback.StochasticWeightAveraging"

EXTENSION = Extension(
    name="swa",
    summary="callbacks=swa: the average of the weights at the ends of the last epochs",
    proven="each commit",
    targets=(_SWA,),
    names={"trainkit.callbacks.StochasticWeightAveraging": _SWA},
)
