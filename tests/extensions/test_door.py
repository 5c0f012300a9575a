"""trainkit/extension.py: which extensions there are, who brings a name,
and what is said of those that cannot be read.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit import extension
from trainkit.__main__ import main
from trainkit.engine.options import refusals
from trainkit.engine.select import make_engine, names
from trainkit.errors import ConfigError
from trainkit.extension import with_current_names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes an installed package `strange` with an entry point,
    and makes it importable.
    """

    def write(text: str) -> None:
        (tmp_path / "strange.py").write_text(text)
        about = tmp_path / "strange-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(
            "[trainkit.extensions]\nstrange = strange:EXTENSION\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        extension._installed.cache_clear()

    yield write
    extension._installed.cache_clear()
    sys.modules.pop("strange", None)


def of(fields: str) -> str:
    """Return the source of an extension with these fields."""
    return (
        "from trainkit.extension import *\nEXTENSION = Extension('strange', 'one', 'by hand',"
        f" {fields})\n"
    )


def typed(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command of this process."""
    monkeypatch.setattr(sys, "argv", ["trainkit", *arguments])
    return main()


def test_an_extension_that_cannot_be_read_breaks_nothing_else(
    package: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands run; the list, and an error about an unknown name, say why its names are missing."""
    package("raise RuntimeError('no such machine')")
    assert typed("explain", monkeypatch=monkeypatch) == 0
    assert typed("extensions", monkeypatch=monkeypatch) == 0
    assert "strange  cannot be used: RuntimeError: no such machine" in capsys.readouterr().out
    assert typed("strange", monkeypatch=monkeypatch) == 2
    assert (
        "The extension strange (of strange) could not be read: RuntimeError: no such machine"
        in capsys.readouterr().err
    )
    with pytest.raises(
        ConfigError, match="engine is 'odd'; it must be one of auto, single, .*could not be read"
    ):
        make_engine("odd")


def test_an_entry_point_that_is_something_else_is_reported(package: Any) -> None:
    """With its type, and what it must be."""
    package("EXTENSION = {}")
    (broken,) = extension.broken()
    assert (
        broken.error
        == "strange:EXTENSION is a builtins.dict; it must be a trainkit.extension.Extension"
    )


@pytest.mark.parametrize(
    ("name", "owner"),
    [("fit", "trainkit itself"), ("serve", "the extension serving (of trainkit)")],
)
def test_two_commands_of_one_name_are_an_error(
    package: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    owner: str,
) -> None:
    """Neither wins in silence: the error names both, and the remedy."""
    package(of(f"commands={{'{name}': Command('x', 'strange.x')}}"))
    assert typed(name, "--help", monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert (
        f"'{name}' is among the commands of {owner} and of the extension strange (of strange)."
        " Uninstall one" in error
    )


def test_two_engines_of_one_name_are_an_error(package: Any) -> None:
    """In a script too."""
    package(of("engines={'ddp': EngineEntry('strange.X')}"))
    with pytest.raises(
        ConfigError,
        match="'ddp' is among the engines of trainkit itself and of the extension strange",
    ):
        make_engine("ddp")
    # which every engine asks when it is imported: only the engine itself is refused
    assert "op" in refusals("single")


def test_the_options_of_an_engine_are_refused_by_the_others(package: Any) -> None:
    """And it refuses theirs, each with the reason that its extension gives."""
    package(
        of(
            "engines={'odd': EngineEntry('strange.Odd', options=('spin',), lacking={'op': 'it sums"
            " nothing'})}"
        )
    )
    assert names()[-1] == "odd"
    assert (
        refusals("ddp")["spin"]
        == "the engine is 'ddp', where it has no effect: it is an option of engine=odd. Leave it"
        " out here."
    )
    assert (
        refusals("odd")["op"]
        == "the engine is 'odd', where it has no effect: it sums nothing. Leave it out here."
    )


def test_a_config_that_names_a_place_of_earlier_versions_is_read() -> None:
    """Wherever it stands in the config."""
    before = {
        "engine": {"_target_": "trainkit.engine.deepspeed.engine.DeepSpeedEngine"},
        "callbacks": [{"_target_": "a.B"}],
    }
    after = with_current_names(before)
    assert after["engine"]["_target_"] == "trainkit.extensions.deepspeed.engine.DeepSpeedEngine"
    assert after["callbacks"] == before["callbacks"]


def test_a_feature_is_asked_as_those_of_the_core(package: Any, tmp_path: Path) -> None:
    """It sees each epoch, and what it keeps is in the checkpoint; None adds none."""
    package(
        of("features=('strange.counts', 'strange.no')")
        + """
from trainkit.run.feature import Feature

loaded = []

class Counts(Feature):
    name = "counts"
    epochs = 0

    def before_epoch(self, epoch):
        self.epochs += 1

    def parts(self, run):
        return {"strange_count": self}

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        loaded.append(state)

def counts(stage):
    return Counts() if stage.kind == "fit" else None

def no(stage):
    return None
"""
    )
    for max_epochs, ckpt_path in ((2, None), (3, tmp_path / "2.pt")):
        trainer = quiet(tmp_path / "run", max_epochs=max_epochs)
        trainer.fit(Line(), loader(8), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{max_epochs}.pt")
    assert sys.modules["strange"].loaded == [{"epochs": 2}]


def names_in(module: str) -> set[str]:
    """Return the names that a module's source defines:
    the framework of an extension need not be installed.
    """
    file = Path(extension.__file__).parents[1] / f"{module.replace('.', '/')}.py"
    body = ast.parse(file.read_text()).body
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assigned += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))} | {
        ast.unparse(each) for each in assigned
    }


@pytest.mark.parametrize("own", extension._own(), ids=lambda own: own.name)
def test_each_dotted_name_of_our_own_exists(own: extension.Extension) -> None:
    """Of commands, usages, engines, targets, checks, ranks, communications, precisions, data sets, features
    and remarks; a public or an old name leads to one that exists.
    """
    dotted = [
        *own.targets,
        *own.checks,
        *(engine.target for engine in own.engines.values()),
        *own.names.values(),
        *own.layouts.values(),
        *own.communications.values(),
        *own.precisions.values(),
        *own.data_sets.values(),
        *([own.url_store] if own.url_store else []),
        *own.ranks.values(),
        *own.advice.values(),
        *own.features,
        *own.remarks,
    ]
    dotted += [
        name for command in own.commands.values() for name in (command.main, command.usage) if name
    ]
    assert dotted or own.name in ("programs", "script")  # which the commands of others use
    for name in dotted:
        module, _, attribute = name.rpartition(".")
        assert attribute in names_in(module), name
