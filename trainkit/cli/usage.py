"""What each command takes: for --help and for tab completion. Imports nothing heavy, for both must answer at once."""

from __future__ import annotations

import textwrap

from trainkit.cli.usage_of_runs import USAGES_OF_RUNS
from trainkit.extension import Usage

_WIDTH = 110
CKPT = "best | last | FOLDER"
FORMATS = "safetensors | huggingface | torch_export | onnx"
TRUST = ("trust", "[MODULE,...]", "[]", "modules that the run's config may name in addition to the allowed ones")
RUN_DIR = ("run_dir", "FOLDER", "runs/<conf>/<date_time>", "the run's folder; of an earlier run, with its own config")
_CKPT = ("ckpt_path", CKPT, "best of run_dir, if it has one", "the checkpoint whose weights are used")

USAGES = {
    "fit": Usage(
        "conf=NAME [key=value ...] [--cfg job] [-m]",
        "Train. With -m: once for each combination of comma-separated values.",
        (
            RUN_DIR,
            ("ckpt_path", CKPT, "none", "resume from this checkpoint"),
            ("resume", "auto", "none", "resume if run_dir has a checkpoint, else start"),
            ("init_weights", "FILE | FOLDER", "none", "begin with these weights, and nothing else of the checkpoint"),
            ("strict", "bool", "true", "false: load the weights of init_weights that fit"),
            ("seed", "int", "0", "of all random numbers"),
            TRUST,
        ),
        ("conf=resnet50", "conf=mlp optimizer.lr=0.1 trainer.max_epochs=3", "-m conf=mlp optimizer.lr=0.05,0.1"),
        takes_config=True,
    ),
    "validate": Usage(
        "run_dir=FOLDER | conf=NAME [key=value ...]",
        "Evaluate a checkpoint on the validation data, and print the metrics.",
        (RUN_DIR, _CKPT, TRUST),
        ("run_dir=runs/mine", "run_dir=runs/mine ckpt_path=last data.batch_size=64"),
        takes_config=True,
    ),
    "test": Usage(
        "run_dir=FOLDER | conf=NAME [key=value ...]",
        "Evaluate a checkpoint on the test data; of an image classifier leaves reports/test.html.",
        (RUN_DIR, _CKPT, TRUST),
        ("run_dir=runs/mine", "run_dir=runs/mine ckpt_path=last"),
        takes_config=True,
    ),
    "predict": Usage(
        "run_dir=FOLDER | conf=NAME [key=value ...]",
        "Write a checkpoint's predictions, and a table of them, into <run_dir>/predictions.",
        (RUN_DIR, _CKPT, ("table", "csv | parquet", "csv", "format of the table; parquet needs pyarrow"), TRUST),
        ("run_dir=runs/mine", "run_dir=runs/mine table=parquet"),
        takes_config=True,
    ),
    "plan": Usage(
        "conf=NAME [ranks=N] [ranks_per_host=N] [memory_gb=N] [key=value ...]",
        "Describe what fit would do, without training: batches, steps, rates, traffic, memory, advice.",
        (
            ("ranks", "int", "those of the launcher, or 1", "ranks of the described run"),
            ("ranks_per_host", "int", "ranks, at most 8", "ranks on one host"),
            ("memory_gb", "int", "none", "memory of a GPU: which engine and settings fit in it"),
        ),
        (
            "conf=resnet50 ranks=64",
            "conf=resnet50 ranks=64 ranks_per_host=4 trainer.precision=bf16",
            "conf=gpt_124m memory_gb=16",
        ),
        takes_config=True,
    ),
    "data": Usage(
        "check conf=NAME [stage=STAGE] [workers=N] [key=value ...]",
        "Read every sample once, with the transforms of the first epoch, and list those that raise, with error and file. Exit "
        "code 1 if there are any.",
        (
            ("stage", "fit | test | predict", "fit", "which data; fit: training and validation"),
            ("workers", "int", "one for each core", "processes that read"),
        ),
        ("check conf=resnet50", "check conf=resnet50 data=imagefolder data.root=/data/imagenet workers=8"),
        takes_config=True,
        parts=("check",),
    ),
    "check-resume": Usage(
        "conf=NAME kill_at=STEP [key=value ...]",
        "Prove that a killed and resumed run ends like one that was never killed: three runs, compared.",
        (
            ("kill_at", "int", "", "the step in which a run is killed"),
            ("save_at", "int", "kill_at - 2", "the step after which it saves"),
            ("steps", "int", "kill_at + 8", "the step where the runs end"),
            ("ranks", "int[,int]", "1", "number of ranks; of two numbers, the resumed run gets the second"),
            ("resume_engine", "NAME", "that of all runs", "engine of the resumed run"),
            ("keep", "bool", "false", "keep the folder of the three runs even if nothing differs"),
        ),
        (
            "conf=mlp kill_at=17",
            "conf=mlp kill_at=17 ranks=2,1 save_at=15",
            "conf=mlp kill_at=9 ranks=2 engine=fsdp resume_engine=ddp",
        ),
        takes_config=True,
    ),
    "export": Usage(
        "ckpt_path=best|last|FOLDER [key=value ...]",
        "Write a checkpoint as a file for other programs, and check it against the Task's outputs. huggingface: as a folder "
        "for `from_pretrained` of transformers.",
        (
            ("ckpt_path", CKPT, "", "best, last, or a checkpoint's folder"),
            ("run_dir", "FOLDER", "the newest one in runs/", "the run of best and last"),
            ("format", FORMATS, "safetensors", "the file's format"),
            ("output", "FILE", "<run_dir>/export/<conf>", "the file, with the format's suffix; the folder of huggingface"),
            TRUST,
        ),
        ("ckpt_path=best run_dir=runs/mine", "ckpt_path=best run_dir=runs/mine format=onnx output=mine.onnx"),
    ),
    **USAGES_OF_RUNS,
    "doctor": Usage(
        "[--json] [--no-allreduce]",
        "Check versions, Horovod's build, GPUs, this host's limits and network, and an allreduce of two ranks. Exit code 0 if "
        "nothing is wrong (there may be warnings), else 1.",
        (
            ("--json", "flag", "off", "for machines: a list of findings, as {area, name, value, status, why, mend}"),
            ("--no-allreduce", "flag", "off", "do not start the two ranks (saves about 10 seconds)"),
        ),
        ("", "--json --no-allreduce"),
    ),
    "explain": Usage(
        "[NAME]",
        "Explain an error that a message names, with an example and what to do. Without a name: list all of them.",
        examples=("", "no-checkpoint"),
    ),
    "extensions": Usage(
        "[--json]",
        "List the extensions: trainkit's own and those of installed packages, what each brings, and how far it is proven "
        "(docs/extensions.md).",
        (("--json", "flag", "off", "the same as JSON"),),
        ("", "--json"),
    ),
    "completion": Usage(
        "bash",
        'Print the shell function for tab completion: eval "$(python -m trainkit completion bash)"',
        examples=("bash",),
    ),
}


def usage_of(command: str) -> str:
    """Return the help of one of trainkit's own commands."""
    return help_text(command, USAGES[command])


def help_text(command: str, usage: Usage) -> str:
    """Return a command's help: usage, arguments with types, defaults and meanings, examples."""
    lines = [f"usage: python -m trainkit {command} {usage.line}", "", *textwrap.wrap(usage.about, _WIDTH), ""]
    heads = {name: f"{name}={kind}" if not name.startswith("-") else name for name, kind, _, _ in usage.options}
    width = min(32, max(map(len, heads.values()), default=0))
    for name, kind, default, text in usage.options:
        ends = f" (default: {default})" if default and kind != "flag" else "" if kind == "flag" else " (required)"
        lines.append(f"  {heads[name]:<{width}}  {text}{ends}")
    lines += ["", "examples:", *(f"  python -m trainkit {command} {example}".rstrip() for example in usage.examples)]
    return "\n".join(lines) + "\n"
