"""Optimizers beside those of torch: their steps are the same on every engine (docs/optimizers.md).

muon.py, adafactor.py   of matrices, also of those that ranks hold in pieces
ademamix.py, soap.py    of the package pytorch_optimizer
lars.py, lamb.py        for large global batches: each layer has its own rate (trust_ratio.py)
sparse_adam.py          torch's SparseAdam, where gradients are summed as dense ones
"""

from trainkit.extension import Extension

_HERE = "trainkit.extensions.optimizers"
_CLASSES = {
    "Muon": f"{_HERE}.muon.Muon",
    "Adafactor": f"{_HERE}.adafactor.Adafactor",
    "AdEMAMix": f"{_HERE}.ademamix.AdEMAMix",
    "SOAP": f"{_HERE}.soap.SOAP",
    "LARS": f"{_HERE}.lars.LARS",
    "LAMB": f"{_HERE}.lamb.LAMB",
}

EXTENSION = Extension(
    name="optimizers",
    summary="optimizer=muon, adafactor, ademamix, soap, lars, lamb: equal weights on every engine",
    proven="each commit; on split weights in the full test run",
    targets=tuple(_CLASSES.values()),
    features=(f"{_HERE}.sparse_adam.of_stage",),
    names={f"trainkit.optim.{name}": place for name, place in _CLASSES.items()},
)
