"""callbacks=finetuning: a backbone that is frozen first, and trained later (docs/lightning.md)."""

from trainkit.extension import Extension

_HERE = "trainkit.extensions.finetuning.callbacks"
_CLASSES = ("BackboneFinetuning", "BaseFinetuning")

EXTENSION = Extension(
    name="finetuning",
    summary="callbacks=finetuning: layers that are frozen first, and trained later",
    proven="each commit",
    targets=tuple(f"{_HERE}.{name}" for name in _CLASSES),
    names={f"trainkit.callbacks.{name}": f"{_HERE}.{name}" for name in _CLASSES},
)
