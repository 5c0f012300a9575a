"""export: a trained Task as one file,
checked against the Task's own outputs (docs/checkpoints.md).
"""

from trainkit.extension import Command, Extension

_EXPORT = "trainkit.extensions.exporting.export.export"

EXTENSION = Extension(
    name="exporting",
    summary="export: a checkpoint as safetensors, for transformers, torch.export or ONNX",
    proven="each commit; files of a GPU not yet",
    commands={
        "export": Command(
            summary=(
                "write a checkpoint as safetensors, for torch.export or ONNX (ckpt_path=best), and"
                " check it"
            ),
            main="trainkit.extensions.exporting.command.main",
            usage="trainkit.extensions.exporting.usage.USAGE",
        )
    },
    names={"trainkit.exporting.export.export": _EXPORT},
)
