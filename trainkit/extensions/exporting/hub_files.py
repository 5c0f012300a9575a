"""What stands beside the weights in a folder for the hub: the tokenizer, the generation config, the
model card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.api.task import Task
from trainkit.checkpoint.format import load_training
from trainkit.errors import CheckpointError, ConfigError
from trainkit.extensions.exporting.model_card import CardFacts, write_card
from trainkit.extensions.language.sources import ModelSource, load_tokenizer
from trainkit.extensions.language.tokenizer_folder import own_tokenizer, write_of_file

_GENERATION = "generation_config.json"


def write_hub_files(
    folder: Path,
    task: Task,
    data: Any,
    run_dir: Path,
    checkpoint: tuple[Path, Mapping[str, Any]],
    is_adapter: bool,
    name: str | None = None,
) -> None:
    """Write them, as far as the run has them.

    Args:
        folder: with the model's files.
        data: of the run, which may hold the tokenizer; None if it is not here.
        run_dir: of the run, which may hold the tokenizer.
        checkpoint: its folder and manifest.
        is_adapter: whether the folder holds adapters alone.
        name: of the model on the hub; None for the folder's.
    """
    source = _write_tokenizer(folder, task, data, run_dir)
    if source is not None and not is_adapter:
        write_generation(folder, source)
    place, manifest = checkpoint
    try:
        training = load_training(place, mapped=True)
    except CheckpointError:  # it has weights only
        training = {}
    facts = CardFacts(
        name=name or folder.name,
        manifest=manifest,
        training=training,
        num_parameters=sum(parameter.numel() for parameter in task.parameters()),
        task=type(task).__name__,
        tokens_per_sample=getattr(task, "tokens_per_sample", None),
        is_adapter=is_adapter,
    )
    write_card(folder, facts)


def _write_tokenizer(folder: Path, task: Task, data: Any, run_dir: Path) -> ModelSource | None:
    """Write the tokenizer that the run has left, or that of its data, or the Task's of bytes; return
    what makes texts with it, if the Task does.
    """
    given = own_tokenizer(run_dir)
    own = getattr(data, "tokenizer", None)
    if given is not None and Path(given).is_file():
        write_of_file(Path(given), folder)
    elif given is not None:
        load_tokenizer(given).save_pretrained(folder)
    elif own is not None and hasattr(own, "save_pretrained"):
        own.save_pretrained(folder)
        given = str(folder)
    elif (source := source_of(task, None)) is not None:
        source.save_tokenizer(folder)
        return source
    return source_of(task, given)


def write_generation(folder: Path, source: ModelSource) -> None:
    """Write which tokens end a text, so that transformers' `generate` ends where `python -m
    trainkit generate` does; beside what the model itself has written.
    """
    path = folder / _GENERATION
    content = json.loads(path.read_text()) if path.is_file() else {}
    content.pop("_from_model_config", None)  # with it transformers reads config.json again
    if not (stops := sorted(source.stops(source.answers))):
        return  # an answer ends by its length
    content["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    path.write_text(json.dumps(content, indent=2) + "\n")


def source_of(task: Task, tokenizer: str | None) -> ModelSource | None:
    """Return what makes texts; None if the Task makes none, or without its tokenizer."""
    make = getattr(task, "text_source", None)
    if not callable(make):
        return None
    try:
        source: ModelSource = make(tokenizer)
    except ConfigError:
        return None
    return source
