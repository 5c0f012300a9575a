"""How a layout is started: the fit that was typed, with the settings of the layout in place of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.extensions.plan.layouts import Layout

# Options of engine=fsdp that a layout decides, and their defaults.
_DECIDED: Mapping[str, Any] = {
    "replicas": 1,
    "tensor": 1,
    "tensor_plan": None,
    "pipeline": 1,
    "pipeline_schedule": "1f1b",
    "pipeline_chunks": None,
    "context": 1,
    "reshard_after_forward": None,
    "cpu_offload": False,
}
_FSDP = "from trainkit.extensions.fsdp.engine import FSDPEngine"
_SPLIT_WEIGHTS = ("fsdp", "deepspeed")
_PYTHON = {"true": "True", "false": "False"}


@dataclass(frozen=True)
class TypedFit:
    """The fit that was typed.

    Attributes:
        line: overrides, or a script and its arguments.
        engine_name: of its engine.
        engine: options of it, by name.
        launcher: that starts its ranks.
    """

    line: str
    engine_name: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)
    launcher: str = "horovodrun"

    @property
    def splits_weights(self) -> bool:
        """Whether its own engine holds no whole copies."""
        return self.engine_name in _SPLIT_WEIGHTS


def start_of(layout: Layout, settings: str, typed: TypedFit) -> str:
    """Return how to start a layout.

    Args:
        settings: of the layout, as overrides.
    """
    chosen = settings.split(" ")
    if typed.line.split(" ")[0].endswith(".py"):
        given = ", ".join(_arguments(chosen, typed))
        start = f"{_launcher(layout, typed)}{typed.line}"
        where = f" ({_FSDP})" * ("FSDPEngine" in given)
        return f"{start}{f', and give its Trainer {given}{where}' * bool(given)}"
    line = " ".join(["fit", *_overrides(layout, chosen, typed)])
    return f"{_launcher(layout, typed)}-m trainkit {line}"


def _launcher(layout: Layout, typed: TypedFit) -> str:
    if layout.ranks == 1:
        return "python "
    if layout.engine == "fsdp" or typed.launcher == "torchrun":
        return "torchrun ... "
    return "horovodrun ... python "


def _overrides(layout: Layout, chosen: Sequence[str], typed: TypedFit) -> list[str]:
    """Return what was typed, without what the layout decides, and the layout's settings."""
    names_typed = {word: _name(word) for word in typed.line.split(" ")}
    has_own = layout.engine == "auto" and not typed.splits_weights
    if has_own:  # of whole copies
        chosen = [word for word in chosen if word != "engine=auto"]
    names = set(map(_name, chosen))
    left = []
    for word, name in names_typed.items():
        decided = not has_own and _decides(layout, typed, name)
        if name not in names and not decided:
            left.append(word)
    defaults = _defaults(layout, names.union(names_typed.values()), typed)
    return [*left, *chosen, *defaults]


def _decides(layout: Layout, typed: TypedFit, name: str) -> bool:
    """Return whether a layout decides a setting."""
    first, _, option = name.partition(".")
    if first != "engine":
        return False
    if layout.engine != typed.engine_name:
        return option != "device"
    option = option.partition(".")[0]
    if option == "tensor_plan":
        return layout.tensor == 1
    return not option or option in _DECIDED


def _defaults(layout: Layout, named: set[str], typed: TypedFit) -> Iterator[str]:
    """Yield what a config's own file sets of the engine, and the layout does not have."""
    if layout.engine != typed.engine_name:
        return
    for option, default in _DECIDED.items():
        name = f"engine.{option}"
        own = typed.engine.get(option, default)
        if own != default and name not in named and _decides(layout, typed, name):
            yield f"{name}={'null' if default is None else str(default).lower()}"


def _name(word: str) -> str:
    """Return the setting of an override."""
    return word.lstrip("+~").partition("=")[0]


def _arguments(chosen: Sequence[str], typed: TypedFit) -> Iterator[str]:
    """Yield a layout's settings as arguments of a script's Trainer."""
    values = dict(word.split("=", 1) for word in chosen)
    options = [
        f"{name.removeprefix('engine.')}={_PYTHON.get(value, value)}"
        for name, value in values.items()
        if name.startswith("engine.")
    ]
    if options:
        yield f"engine=FSDPEngine({', '.join(options)})"
    elif values["engine"] != "auto" or typed.splits_weights:
        yield f'engine="{values["engine"]}"'
    for name, value in values.items():
        if name.startswith("trainer."):
            yield f"{name.removeprefix('trainer.')}={_PYTHON.get(value, value)}"
