"""What `export` takes."""

from trainkit.cli.usage import CKPT, TRUST
from trainkit.extension import Usage

_FORMATS = "safetensors | huggingface | peft | torch_export | onnx"

USAGE = Usage(
    "ckpt_path=best|last|FOLDER [key=value ...]",
    "Write a checkpoint as a file for other programs, and check it against the Task's outputs."
    " huggingface: as a folder for `from_pretrained` of transformers. peft: adapters alone; the"
    " other formats hold the model with the adapters in its weights.",
    (
        ("ckpt_path", CKPT, "", "best, last, or a checkpoint's folder"),
        ("run_dir", "FOLDER", "the newest one in runs/", "the run of best and last"),
        ("format", _FORMATS, "safetensors", "the file's format"),
        (
            "output",
            "FILE",
            "<run_dir>/export/<conf>",
            "the file, with the format's suffix; the folder of huggingface and peft",
        ),
        (
            "push_to_hub",
            "NAME",
            "none",
            "upload the folder of huggingface or peft, as me/model; the token is HF_TOKEN",
        ),
        ("private", "true | false", "the hub's", "whether the uploaded model is private"),
        TRUST,
    ),
    (
        "ckpt_path=best run_dir=runs/mine",
        "ckpt_path=best run_dir=runs/mine format=onnx output=mine.onnx",
        "ckpt_path=best run_dir=runs/gpt format=huggingface push_to_hub=me/my-gpt private=true",
    ),
)
