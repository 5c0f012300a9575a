"""Adapters: a frozen model with small trained layers beside its own: callbacks=lora, export
format=peft (docs/language_models.md).

lora.py         the callback: which layers, what a checkpoint holds, what it refuses
targets.py      the modules that a setting names
base.py         the frozen weights: their fingerprint, and norms that stand still
peft_models.py  the only home of peft
"""

from trainkit.extension import Extension

_LORA = "trainkit.extensions.adapters.lora.LoRA"

EXTENSION = Extension(
    name="adapters",
    summary="callbacks=lora: peft's LoRA and DoRA on any Task; export format=peft",
    proven="each commit; on a GPU not yet",
    targets=(_LORA,),
    names={"trainkit.callbacks.LoRA": _LORA},
)
