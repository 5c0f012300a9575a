"""The house's layering, read from the imports:
lower floors never import higher, foreign frameworks have one home.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

import trainkit

ROOT = Path(trainkit.__file__).parent

# From the ground up. A module imports from its own room and from lower floors. A room is a file or
# a folder.
FLOORS = [
    ["collector", "errors", "openmp", "version"],
    ["extension"],
    ["arguments", "console", "safety"],
    ["launch"],
    ["device"],
    ["data", "metrics", "optim"],
    ["engine"],
    ["checkpoint"],
    ["api"],
    ["callbacks", "loggers"],
    ["run"],
    ["loop"],
    ["trainer"],
    ["config"],
    ["tuning"],
    ["cli"],
    ["__main__"],
    ["extensions"],  # found by name alone: nothing below imports one
]

# foreign framework -> the files that may import it.
HOMES = {
    "horovod": [
        "engine/horovod/engine.py",
        "engine/horovod/collectives.py",
        "engine/horovod/reduce.py",
        "engine/horovod/heartbeat.py",
        "engine/horovod/waiting.py",
        "engine/horovod/rendezvous.py",
        "extensions/elastic/driver.py",
        "extensions/elastic/horovodrun.py",
        "extensions/elastic/ranks.py",
        "extensions/elastic/upstream.py",
    ],
    "torch.distributed": [
        "engine/ddp/collectives.py",
        "engine/ddp/reduce.py",
        "extensions/fsdp/engine.py",
        "extensions/fsdp/own_group.py",
        "extensions/fsdp/replicas.py",
        "extensions/fsdp/tensor.py",
        "extensions/fsdp/units.py",
        "extensions/elastic/store.py",
        "extensions/context/ranks.py",
        "extensions/pipeline/links.py",
        "extensions/pipeline/pipeline.py",
    ],
    "deepspeed": ["extensions/deepspeed/adapter.py"],
    # an exception: for an isinstance check, to refuse its sampler
    "torch.utils.data.distributed": ["data/loader.py"],
    "hydra": ["config/compose.py", "config/*.py", "cli/*.py"],
    "omegaconf": ["config/compose.py", "config/*.py", "cli/*.py", "extensions/*command.py"],
    "onnx": [],  # torch.onnx brings it
    "onnxruntime": ["extensions/exporting/onnx.py"],
    "ray": ["extensions/ray/*", "extensions/serving/*.py"],
    "peft": ["extensions/adapters/peft_models.py"],
    "lm_eval": ["extensions/suites/harness.py"],
    "huggingface_hub": ["extensions/exporting/hub.py"],
    "tokenizers": ["extensions/language/tokenizer.py"],
    "wandb": ["extensions/trackers/wandb.py"],
    "mlflow": ["extensions/trackers/mlflow.py"],
    "prometheus_client": ["extensions/trackers/prometheus.py"],
    "greenlet": ["extensions/by_hand/loop.py"],
    "psutil": ["extensions/insight/device_stats.py"],
    "scipy": ["extensions/experiment/statistics.py"],
    "pynvml": ["extensions/insight/device_stats.py"],
    "kubernetes_validate": ["extensions/kubernetes/schemas.py"],
    "tensorboard": ["loggers/tensorboard.py"],
    "plotly": [
        "extensions/*/page.py",
        "extensions/*/*/page.py",
    ],
    "torch.utils.tensorboard": ["loggers/tensorboard.py"],
}

# Whoever asks for help, or made a mistake in a config, does not wait for torch.
TORCH_FREE = [
    "__main__",
    "arguments",
    "cli.*",
    "config.allowlist",
    "config.compose",
    "config.resources",
    "config.schema",
    "config.signature",
    "engine.horovod.tuning",
    "engine.options",
    "engine.ranks",
    "engine.select",
    "errors",
    "extension",
    "extensions.timeline.traces.*",
    "extensions.doctor.*",
    "extensions.elastic.*",
    "extensions.exporting.request",
    "extensions.kubernetes.*",
    "extensions.reports.grid",
    "extensions.reports.page",
    "extensions.slurm.*",
    "launch.*",
    "extensions.timeline.report.gradients",
    "extensions.timeline.report.overlap",
    "extensions.timeline.report.recorded_facts",
    "extensions.timeline.report.steps",
    "extensions.timeline.report.advice",
    "extensions.timeline.report.page",
    "extensions.timeline.report.text",
    "console",
    "safety.threads",
    "api.lightning_names",
    "run.lock",
    "extensions.horovod_build.*",
    "version",
]
NEEDS_TORCH = {
    "cli.execute",  # the half of `fit` that starts once the config was found good
    "extensions.elastic.attempts",  # of a fit
    "extensions.elastic.callback",
    "extensions.elastic.copies.layout",  # of a rank
    "extensions.elastic.copies.policy",
    "extensions.elastic.copies.store",
    "extensions.elastic.rehearsal",
    "extensions.elastic.store",  # of torch's groups
}


@dataclass(frozen=True)
class Import:
    """One imported module, as "torch.nn" or "trainkit.errors".

    Attributes:
        late: whether a function imports it.
        for_types: whether it is imported under TYPE_CHECKING alone. The floors count it; the start
            of a process does not.
    """

    module: str
    late: bool
    for_types: bool = False


@cache
def modules() -> dict[str, Path]:
    """Return all modules of the package: dotted name below trainkit ("" is its face) -> file."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> list[Import]:
    """Return what a module imports, types included."""
    return list(_walk(ast.parse(modules()[name].read_text()), late=False))


def _walk(node: ast.AST, late: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, late) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        base = str(node.module)
        for alias in node.names:  # `from trainkit.data import order` imports a module
            whole = f"{base}.{alias.name}"
            yield Import(whole if whole.removeprefix("trainkit.") in modules() else base, late)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in [*node.body, *node.orelse]:
            for found in _walk(child, late):
                yield replace(found, for_types=found.for_types or child in node.body)
    else:
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            target = node.args[0]
            if isinstance(target, ast.Constant) and str(target.value).startswith("trainkit."):
                yield Import(str(target.value), late)
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, late)


def inner(name: str) -> list[str]:
    """Return the modules of trainkit that a module imports."""
    return [
        i.module.removeprefix("trainkit.")
        for i in imports(name)
        if i.module.startswith("trainkit.")
    ]


def floor_of(name: str) -> int:
    """Return the floor of a module's room."""
    (floor,) = [i for i, rooms in enumerate(FLOORS) if name.split(".")[0] in rooms]
    return floor


def within(module: str, framework: str) -> bool:
    """Return whether a module is the framework or a part of it."""
    return module == framework or module.startswith(framework + ".")


def test_all_modules_are_found() -> None:
    """The walk sees the whole package: a guard that looks at nothing would always be content."""
    assert len(modules()) >= 35
    assert {"loop", "engine.horovod.engine", "data.plan", "callbacks.checkpoint"} <= set(modules())


def test_every_module_has_a_floor() -> None:
    """Each module stands on one floor of the table, so that a new one must be given its place."""
    rooms = [room for floor in FLOORS for room in floor]
    assert len(rooms) == len(set(rooms))
    assert sorted({name.split(".")[0] for name in modules() if name} - set(rooms)) == []


def test_imports_go_down() -> None:
    """A module imports from its own room or from a lower floor,
    never from higher up or from the next room.
    """
    wrong = [
        f"{name} -> {target}"
        for name in modules()
        if name
        for target in inner(name)
        if target.split(".")[0] != name.split(".")[0] and floor_of(target) >= floor_of(name)
    ]
    assert wrong == []


def test_the_core_names_no_extension() -> None:
    """Neither in an import nor in a text: extensions are found through trainkit/extension.py, by
    their folder's name alone.

    But for the package's face, which lists the public names of all.
    """
    named = re.compile(r"trainkit[./]extensions[./]\w")
    core = {
        name: path
        for name, path in modules().items()
        if name and name.split(".")[0] != "extensions"
    }
    assert [name for name, path in core.items() if named.search(path.read_text())] == []


def test_no_room_imports_in_a_circle() -> None:
    """Within a room too, no module leads back to itself."""
    graph = {name: inner(name) for name in modules()}

    def reach(name: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[name])
        while todo:
            target = todo.pop()
            if target not in seen:
                seen.add(target)
                todo += graph[target]
        return seen

    assert [name for name in graph if name in reach(name)] == []


@pytest.mark.parametrize("framework", HOMES)
def test_a_framework_is_imported_in_one_adapter(framework: str) -> None:
    """Only the files of the table import a foreign framework,
    and each of the table's files does.
    """
    users = {
        modules()[name].relative_to(ROOT).as_posix()
        for name in modules()
        if any(within(i.module, framework) for i in imports(name))
    }
    homes = HOMES[framework]
    assert {
        user for user in users if not any(fnmatch.fnmatch(user, home) for home in homes)
    } == set()
    assert not homes or fnmatch.filter(users, homes[0]), (
        f"{homes[0]} no longer imports {framework}: correct the table"
    )


def test_no_module_imports_through_the_face() -> None:
    """`from trainkit import Task` is for users;
    the package names the module where a thing lives.
    """
    assert [
        name for name in modules() if name and any(i.module == "trainkit" for i in imports(name))
    ] == []


def test_the_face_imports_the_version_alone() -> None:
    """`import trainkit` loads nothing but the version; names are loaded when they are used."""
    assert [
        i.module
        for i in imports("")
        if i.module.startswith("trainkit") and not i.for_types and not i.late
    ] == ["trainkit.version"]


def test_core_imports_at_the_top() -> None:
    """Below the Trainer no function imports, save an optional dependency in its own home."""
    late = {
        (name, i.module)
        for name in modules()
        if name and floor_of(name) <= floor_of("trainer")
        for i in imports(name)
        if i.late
    }
    assert late == {
        ("engine.ddp", "trainkit.engine.ddp.engine"),  # the engine that a run uses, and no other
        ("engine.horovod", "trainkit.engine.horovod.engine"),
        ("run.compile", "torch._dynamo"),  # slow as well
        ("loggers.media_files", "PIL"),  # slow as well, and most runs log no picture
        ("loggers.tensorboard", "tensorboard.backend.event_processing.event_file_loader"),
        ("loggers.tensorboard", "torch.utils.tensorboard.summary"),  # slow too
        ("loggers.tensorboard", "torch.utils.tensorboard.writer"),
    }


def test_torch_free_modules_never_reach_torch() -> None:
    """Help, errors in a config and the launchers' commands need no torch:
    no chain of imports leads there.
    """
    chosen = {
        name for name in modules() if any(fnmatch.fnmatch(name, pattern) for pattern in TORCH_FREE)
    } - NEEDS_TORCH
    assert len(chosen) >= len(TORCH_FREE)
    assert [chain for chain in map(chain_to_torch, chosen) if chain] == []


def chain_to_torch(name: str) -> str:
    """Return the first chain of top-level imports from a module to torch, or an empty text."""
    todo, seen = [(name, name)], {name}
    while todo:
        here, chain = todo.pop()
        for i in imports(here):
            if i.late or i.for_types:
                continue
            if within(i.module, "torch"):
                return f"{chain} -> {i.module}"
            target = i.module.removeprefix("trainkit.") if within(i.module, "trainkit") else ""
            packages = (
                [".".join(target.split(".")[:n]) for n in range(1, target.count(".") + 2)]
                if target
                else []
            )
            for step in packages:  # importing a.b runs a/__init__.py first
                if step in modules() and step not in seen:
                    seen.add(step)
                    todo.append((step, f"{chain} -> {step}"))
    return ""


def test_the_chain_to_torch_is_seen() -> None:
    """The walk follows chains over several modules, packages included."""
    assert chain_to_torch("engine.single") == "engine.single -> engine.pinning -> torch"
    assert chain_to_torch("api.dispatch").startswith("api.dispatch -> ")
    assert chain_to_torch("loggers.csv").count(" -> ") >= 2
