"""A step that failed, kept and run again: callbacks=capsule, callbacks=spikes, and `replay`
(docs/elastic.md).

crash_capsule.py    keeps the last steps of a run, and writes the one that failed into a folder that `replay` takes
spike_detection.py  finds losses and gradients that jump, without waiting for the device
folder.py           the files of a capsule
replay.py           runs the step of a capsule again, in one process; rebuild.py, watch.py and show.py are its parts
"""

from trainkit.extension import Command, Extension

_CAPSULE = "trainkit.extensions.capsule.crash_capsule.CrashCapsule"
_SPIKES = "trainkit.extensions.capsule.spike_detection.SpikeDetection"

EXTENSION = Extension(
    name="capsule",
    summary="callbacks=capsule and callbacks=spikes keep a step that failed; replay runs it again",
    proven="each commit",
    commands={
        "replay": Command(
            summary="replay a step saved by callbacks=capsule, and report its non-finite values",
            main="trainkit.extensions.capsule.command.main",
            usage="trainkit.extensions.capsule.usage.USAGE",
        )
    },
    targets=(_CAPSULE, _SPIKES),
    names={
        "trainkit.callbacks.CrashCapsule": _CAPSULE,
        "trainkit.callbacks.SpikeDetection": _SPIKES,
    },
)
