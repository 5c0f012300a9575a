"""What each command takes: for --help and for tab completion.
Imports nothing heavy, for both must answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import textwrap
from collections.abc import Iterator

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

_WIDTH = 110
_UNREAD = 141  # as a shell shows the end by SIGPIPE
CKPT = "best | last | FOLDER"
TRUST = (
    "trust",
    "[MODULE,...]",
    "[]",
    "modules that the run's config may name in addition to the allowed ones",
)
RUN_DIR = (
    "run_dir",
    "FOLDER",
    "runs/<conf>/<date_time>",
    "the run's folder; of an earlier run, with its own config",
)
_CKPT = (
    "ckpt_path",
    CKPT,
    "best of run_dir, if it has one",
    "the checkpoint whose weights are used",
)

USAGES = {
    "fit": Usage(
        "conf=NAME [key=value ...] [--cfg job] [-m]",
        "Train. With -m: once for each combination of comma-separated values.",
        (
            RUN_DIR,
            ("ckpt_path", CKPT, "none", "resume from this checkpoint"),
            ("resume", "auto", "none", "resume if run_dir has a checkpoint, or start at ckpt_path"),
            (
                "init_weights",
                "FILE | FOLDER",
                "none",
                "begin with these weights, and nothing else of the checkpoint",
            ),
            ("strict", "bool", "true", "false: load the weights of init_weights that fit"),
            ("seed", "int", "0", "of all random numbers"),
            TRUST,
        ),
        (
            "conf=resnet50",
            "conf=mlp optimizer.lr=0.1 trainer.max_epochs=3",
            "-m conf=mlp optimizer.lr=0.05,0.1",
        ),
        takes_config=True,
    ),
    "validate": Usage(
        "run_dir=FOLDER | conf=NAME [key=value ...]",
        "Evaluate a checkpoint on the validation data, and print the metrics.",
        (RUN_DIR, _CKPT, TRUST, OPTION),
        ("run_dir=runs/mine", "run_dir=runs/mine ckpt_path=last data.batch_size=64"),
        takes_config=True,
    ),
    "test": Usage(
        "run_dir=FOLDER | conf=NAME [key=value ...]",
        "Evaluate a checkpoint on the test data; of an image classifier leaves reports/test.html.",
        (RUN_DIR, _CKPT, TRUST, OPTION),
        ("run_dir=runs/mine", "run_dir=runs/mine ckpt_path=last"),
        takes_config=True,
    ),
    "predict": Usage(
        "run_dir=FOLDER | conf=NAME [key=value ...]",
        "Write a checkpoint's predictions, and a table of them, into <run_dir>/predictions.",
        (
            RUN_DIR,
            _CKPT,
            ("table", "csv | parquet", "csv", "format of the table; parquet needs pyarrow"),
            TRUST,
        ),
        ("run_dir=runs/mine", "run_dir=runs/mine table=parquet"),
        takes_config=True,
    ),
    "extensions": Usage(
        "[--json]",
        "List the extensions: trainkit's own and those of installed packages, what each brings, and"
        " how far it is proven (docs/how_it_works.md).",
        (("--json", "flag", "off", "the same as JSON"),),
        ("", "--json"),
    ),
}


@contextlib.contextmanager
def read_in_part() -> Iterator[None]:
    """Print lists and help within it: if their reader ends before, as `| head` does, this process
    ends in silence too; on a full disk with a sentence. Signals stay as they are: other threads
    may have connections.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # also without a sys.stdout
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        out = sys.__stdout__
        if out is not None and out is sys.stdout:  # Python's end would write again, and say so
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        full = f"Error: the output cannot be written: {error.strerror}."
        raise SystemExit(_UNREAD if isinstance(error, BrokenPipeError) else full) from None


def usage_of(command: str) -> str:
    """Return the help of one of trainkit's own commands."""
    return help_text(command, USAGES[command])


def help_text(command: str, usage: Usage) -> str:
    """Return a command's help: usage, arguments with types, defaults and meanings, examples."""
    lines = [
        f"usage: python -m trainkit {command} {usage.line}",
        "",
        *textwrap.wrap(usage.about, _WIDTH),
        "",
    ]
    heads = {
        name: f"{name}={kind}" if not name.startswith("-") else name
        for name, kind, _, _ in usage.options
    }
    width = min(32, max(map(len, heads.values()), default=0))
    for name, kind, default, text in usage.options:
        ends = (
            f" (default: {default})"
            if default and kind != "flag"
            else ""
            if kind == "flag"
            else " (required)"
        )
        lines.append(f"  {heads[name]:<{width}}  {text}{ends}")
    lines += [
        "",
        "examples:",
        *(f"  python -m trainkit {command} {example}".rstrip() for example in usage.examples),
    ]
    return "\n".join(lines) + "\n"
