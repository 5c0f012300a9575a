"""The model that a suite evaluates, as a folder of transformers; and the file of its results."""

from __future__ import annotations

import contextlib
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.cli.as_json import json_text
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.exporting.from_run import write_for_transformers
from trainkit.extensions.exporting.places import has_checkpoints

_REPORTS = Path("reports", "lm-eval")


class Evaluated(NamedTuple):
    """A folder of transformers, a line about it, and the name of the run's checkpoint that it is;
    None of a folder that is no run's.
    """

    folder: Path
    line: str
    checkpoint: str | None


@contextlib.contextmanager
def opened(path: Path, ckpt_path: str, trust: Sequence[str]) -> Iterator[Evaluated]:
    """Yield the causal model of a folder, or of a run's checkpoint, exported for the time of the
    context.

    Raises:
        ConfigError: the folder's model is of another kind, or has no tokenizer.
        TaskError: the run's is.
    """
    if not has_checkpoints(path):
        if refusal := _refusal(path):
            raise ConfigError(f"{path} {refusal}")
        yield Evaluated(path, f"model       {path}", None)
        return
    with tempfile.TemporaryDirectory(dir=path, prefix=".evaluate-") as place:
        folder = Path(place, "model")
        try:
            checkpoint, line = write_for_transformers(ckpt_path, path, folder, trust)
        except TaskError as error:
            raise TaskError(f"lm-eval evaluates models of transformers: {error}") from error
        if refusal := _refusal(folder):
            raise TaskError(f"The run {path} {refusal}")
        yield Evaluated(folder, line, checkpoint.name)


def _refusal(folder: Path) -> str:
    """Return why a folder cannot be evaluated, "" if it can.

    lm-eval would take an encoder too, with an output layer of random weights.
    """
    transformers: Any = importlib.import_module("transformers")
    named = json.loads((folder / "config.json").read_text()).get("architectures") or ["none"]
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    known = {name for entry in causal for name in ([entry] if isinstance(entry, str) else entry)}
    if named[0] not in known:
        return (
            f"has a model of the class {named[0]}, which is no causal model of transformers"
            f" {transformers.__version__}. lm-eval evaluates those."
        )
    if not (folder / "tokenizer_config.json").is_file():
        return (
            "has no tokenizer. Give the folder that `export format=huggingface` writes, with the"
            " tokenizer of its data in it (save_pretrained)."
        )
    return ""


def write_results(run_dir: Path, facts: Mapping[str, Any]) -> Path:
    """Add the results to the file of their checkpoint, in which those of other tasks stay; return
    it.
    """
    path = run_dir / _REPORTS / f"{facts['checkpoint']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {key: facts[key] for key in ("settings", "versions")}
    before = json.loads(path.read_text())["tasks"] if path.is_file() else {}
    now = {name: entry | about for name, entry in facts["tasks"].items()}
    content = {key: facts[key] for key in ("suite", "checkpoint")} | {"tasks": before | now}
    draft = path.with_suffix(".draft")
    draft.write_text(json_text(content) + "\n")
    draft.replace(path)
    return path
