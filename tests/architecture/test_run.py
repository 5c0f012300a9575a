"""A Run is constructed: what it has is set by itself alone, whole,
and a fit is built by a recipe that one can read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_layering import modules
from tests.architecture.test_sizes import members

OF_RUN = {"run.run", "run.lightning_names"}  # the files of its class and of its base
OF_TRAINER = {"config.instantiate"}  # whose `trainer` is a Trainer
SETTABLE = {"should_stop"}  # for users, as in Lightning
NAMES = {"run", "_run", "trainer", "_trainer", "_fitted"}  # under which others know a Run


def attributes() -> set[str]:
    """Return the names of a Run's members."""
    found: set[str] = set()
    for module in OF_RUN:
        tree = ast.parse(modules()[module].read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in ("Run", "LightningNames"):
                found |= members(node)
    return found - SETTABLE


def writes(tree: ast.AST) -> Iterator[str]:
    """Yield what a file assigns to something that is named as a Run is, or sets by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = node.value
            name = (
                owner.id
                if isinstance(owner, ast.Name)
                else owner.attr
                if isinstance(owner, ast.Attribute)
                else ""
            )
            if name in NAMES:
                yield node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
        ):
            owner = node.args[0]
            if (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")) in NAMES:
                yield ast.unparse(node.args[1]).strip("'")


@pytest.mark.parametrize(
    "code",
    [
        "run.step = 1",
        "self._run.step = 1",
        "stage.run.step, x = 1, 2",
        "trainer.step += 1",
        "setattr(run, 'step', 1)",
    ],
)
def test_writes_are_seen(code: str) -> None:
    """Each way to write to a Run from outside is noticed."""
    assert list(writes(ast.parse(code))) == ["step"]


def test_a_run_is_constructed_and_not_filled() -> None:
    """No other file writes an attribute of a Run:
    it is constructed, and takes the parts of a fit whole.
    """
    own = attributes()
    assert {"step", "hooks", "optimizers", "datamodule", "callback_metrics"} <= own
    written = {
        name: sorted(set(writes(ast.parse(path.read_text()))) & own)
        for name, path in modules().items()
    }
    assert {
        name: names for name, names in written.items() if names and name not in OF_RUN | OF_TRAINER
    } == {}


MOST_STATEMENTS = 20


def recipe() -> ast.FunctionDef:
    """Return build_run."""
    tree = ast.parse(modules()["run.build"].read_text())
    return next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "build_run"
    )


def test_building_a_run_reads_as_a_recipe() -> None:
    """build_run has few statements and no branch:
    what depends on an option asks the features of the fit.
    """
    nodes = list(ast.walk(recipe()))
    assert sum(isinstance(node, ast.stmt) for node in nodes) - 1 <= MOST_STATEMENTS
    assert not [
        node
        for node in nodes
        if isinstance(node, (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Try))
    ]


def test_every_feature_is_in_the_list() -> None:
    """A Feature that is written is in the one list of them: features.py makes it. Those of
    extensions are named by theirs.
    """
    written, made = set(), set()
    for name, path in modules().items():
        if name.startswith("extensions."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "Feature" in [
                ast.unparse(base) for base in node.bases
            ]:
                written.add(node.name)
            elif (
                name == "run.features"
                and isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
            ):
                made.add(node.func.id)
    assert len(written) >= 8
    assert written - made == set()
