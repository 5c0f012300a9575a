"""The model card of a folder for the hub, README.md: the hub's header, how to load the model, and
the run's contract, as far as its checkpoint holds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.optim.batch_plan import BatchPlan

CARD = "README.md"
# The end of an architecture's name -> the hub's name of what it does.
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_ARGUMENTS = 8  # of an optimizer or a schedule, at most
_LONGEST = 40  # letters of one of them; longer ones may be paths


@dataclass(frozen=True)
class CardFacts:
    """What a card says.

    Attributes:
        name: the model's: of the folder, or on the hub.
        manifest: of the checkpoint.
        training: the state beside the checkpoint's weights; {} if there is none.
        num_parameters: of the Task.
        task: the Task's class.
        tokens_per_sample: None if that is not one number.
        is_adapter: whether the folder holds adapters alone.
    """

    name: str
    manifest: Mapping[str, Any]
    training: Mapping[str, Any]
    num_parameters: int
    task: str
    tokens_per_sample: float | None = None
    is_adapter: bool = False


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write README.md into a folder with the model's config.json."""
    architecture = _architecture(folder)
    config = facts.manifest.get("config") or {}
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _contract(facts, config))
    parts = [
        _header(architecture, config, facts.is_adapter),
        f"# {facts.name}",
        f"{architecture or facts.task} with {facts.num_parameters:,} parameters, trained by trainkit.",
        _usage(architecture, facts),
        f"## Training\n\n| | |\n|---|---|\n{rows}",
        _table("Last values", facts.manifest.get("metrics") or {}),
        _table("Versions", facts.manifest.get("versions") or {}),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def _architecture(folder: Path) -> str:
    """Return the class of transformers, "" for none."""
    path = folder / "config.json"
    named = json.loads(path.read_text()).get("architectures") if path.is_file() else None
    return str(named[0]) if named else ""


def _header(architecture: str, config: Mapping[str, Any], is_adapter: bool) -> str:
    """Return the metadata that the hub reads, in YAML."""
    lines = [f"library_name: {'peft' if is_adapter else 'transformers'}"]
    pipelines = [name for end, name in _PIPELINES.items() if architecture.endswith(end)]
    lines += [f"pipeline_tag: {name}" for name in pipelines[:1]]
    base = (config.get("task") or {}).get("model")
    # a folder of the machine is none of the hub's business
    if isinstance(base, str) and _HUB_NAME.fullmatch(base) and not Path(base).exists():
        lines.append(f"base_model: {base}")
    lines += ["tags:", "- trainkit"]
    return "\n".join(["---", *lines, "---"])


def _usage(architecture: str, facts: CardFacts) -> str:
    if facts.is_adapter:
        code = (
            f'from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base, "{facts.name}")'
        )
    elif architecture:
        code = (
            f"from transformers import {architecture}\n\n"
            f'model = {architecture}.from_pretrained("{facts.name}")'
        )
    else:
        return ""
    return f"```python\n{code}\n```"


def _contract(facts: CardFacts, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the checkpoint holds of the run, row by row."""
    manifest, training = facts.manifest, facts.training
    if config.get("conf"):
        yield "config", str(config["conf"])
    yield "task", facts.task
    groups = (training.get("rates") or {}).get("given") or []
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    if manifest.get("contract"):
        plan = BatchPlan(**_with_tuples(manifest["contract"]))
        lines = dict(plan.describe(rates))
        yield "global batch", lines["global batch"]
        if rates:
            yield "learning rate", lines["learning rate"]
    for name in ("lr", "optimizer"):
        part = config.get(name) or (config.get("task") or {}).get(name)
        if isinstance(part, Mapping) and part.get("_target_"):
            yield ("schedule" if name == "lr" else name), _call(part)
    trainer = config.get("trainer") or {}
    if trainer.get("precision"):
        yield "precision", str(trainer["precision"])
    if trainer.get("gradient_clip_val"):
        yield "gradient clipping", str(trainer["gradient_clip_val"])
    yield "steps", f"{manifest.get('global_step'):,}"
    yield from _seen(training, facts.tokens_per_sample)
    if "seed" in config:
        yield "seed", str(config["seed"])


def _seen(training: Mapping[str, Any], per_sample: float | None) -> Iterator[tuple[str, str]]:
    samples = (training.get("state") or {}).get("samples_seen")
    if samples:
        yield "samples seen", f"{samples:,}"
        if per_sample:
            yield "tokens seen", f"{round(samples * per_sample):,}"


def _call(part: Mapping[str, Any]) -> str:
    """Return `torch.optim.AdamW(lr=0.004, ...)` of a config's part, without texts as long as a
    path.
    """
    given = {name: value for name, value in part.items() if not name.startswith("_")}
    shown = [f"{name}={value}" for name, value in given.items() if _is_short(value)]
    return f"{part['_target_']}({', '.join(shown[:_ARGUMENTS])})"


def _is_short(value: Any) -> bool:
    return value is not None and len(str(value)) <= _LONGEST and "/" not in str(value)


def _with_tuples(contract: Mapping[str, Any]) -> dict[str, Any]:
    """Return a contract as it was before it was JSON."""
    later: Sequence[Sequence[int]] = contract.get("later") or ()
    return {**contract, "later": tuple((epoch, number) for epoch, number in later)}


def _table(heading: str, values: Mapping[str, Any]) -> str:
    rows = [
        f"| {_cell(name)} | {_cell(f'{value:.6g}' if isinstance(value, float) else value)} |"
        for name, value in values.items()
    ]
    return "\n".join([f"## {heading}", "", "| | |", "|---|---|", *rows]) if rows else ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
