"""profiler=simple, advanced, pytorch: where the time of a fit goes, by hook, by function and by
operation (docs/logging.md).
"""

from trainkit.extension import Extension

_HERE = "trainkit.extensions.profilers.callbacks"
_CLASSES = ("SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler")

EXTENSION = Extension(
    name="profilers",
    summary="trainer.profiler: the time of a fit by hook, by function, by operation",
    proven="each commit",
    targets=tuple(f"{_HERE}.{name}" for name in _CLASSES),
    names={f"trainkit.callbacks.{name}": f"{_HERE}.{name}" for name in _CLASSES},
)
