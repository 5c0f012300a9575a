"""Faults: kills, hangs and errors at a chosen rank and step,
to try what a job survives (docs/elastic.md).
"""

from trainkit.extension import Extension

_FAULTS = "trainkit.extensions.faults.callback.FaultInjection"

EXTENSION = Extension(
    name="faults",
    summary="callbacks=faults: kills, hangs and errors at a chosen rank and step",
    proven="each commit",
    targets=(_FAULTS,),
    names={
        "trainkit.callbacks.FaultInjection": _FAULTS,
        "trainkit.callbacks.fault_injection.FaultInjection": _FAULTS,
    },
)
