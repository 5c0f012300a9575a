"""communication=powersgd, local_sgd, diloco: fewer bytes between ranks, for an approximate gradient
(docs/communication.md).

settings.py       what each is, and its options
checks.py         what they exclude
approximation.py  what an engine does by them
low_rank.py       PowerSGD: gradients travel as two narrow factors
rounds.py         ranks step alone, and meet by an outer step
"""

from trainkit.extension import Extension

_HERE = "trainkit.extensions.communication.settings"
_BEFORE = "trainkit.engine.approximate.settings"
_CLASSES = {"powersgd": "PowerSGD", "local_sgd": "LocalSGD", "diloco": "DiLoCo"}

EXTENSION = Extension(
    name="communication",
    summary="communication=powersgd, local_sgd, diloco: fewer bytes, for an approximate gradient",
    proven="each commit",
    communications={name: f"{_HERE}.{kind}" for name, kind in _CLASSES.items()},
    targets=tuple(f"{_HERE}.{kind}" for kind in _CLASSES.values()),
    names={
        f"{module}.{kind}": f"{_HERE}.{kind}"
        for kind in _CLASSES.values()
        for module in ("trainkit", _BEFORE)
    }
    | {f"{_BEFORE}.Exact": "trainkit.engine.step_settings.Exact"},
)
