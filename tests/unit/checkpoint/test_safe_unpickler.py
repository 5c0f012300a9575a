"""Nothing of a file is run: calls hidden in pickles, in all the ways that pickles call."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.foreign_files import Calls, Settings, lightning, net, same, saved
from trainkit.checkpoint import safe_unpickler
from trainkit.checkpoint.weights import read_weights
from trainkit.errors import CheckpointError


def payloads(mark: Path) -> dict[str, Any]:
    """Return objects that create the file `mark` when unpickled."""
    touch = f"open({str(mark)!r}, 'w').close()"
    module = Calls(importlib.import_module, "os")
    return {
        "os.system": Calls(os.system, f"touch {mark}"),
        "eval": Calls(eval, touch),
        "exec": Calls(exec, touch),
        "open": Calls(open, str(mark), "w"),
        "a chain of getattr": Calls(Calls(getattr, module, "system"), f"touch {mark}"),
        "a partial": Calls(Calls(functools.partial, os.system, f"touch {mark}")),
        "a map": Calls(list, Calls(map, eval, [touch])),
        "a method": Calls(Calls(getattr, Path(mark), "touch")),
        "in a tensor's place": Calls(
            torch._utils._rebuild_parameter, Calls(eval, touch), False, collections.OrderedDict()
        ),
        "in a tensor's subclass": Calls(
            torch._tensor._rebuild_from_type_v2, eval, Tensor, (touch,), {}
        ),
    }


@pytest.mark.parametrize("name", payloads(Path("mark")))
def test_a_payload_never_runs(name: str, tmp_path: Path) -> None:
    """Whatever call a Lightning checkpoint hides among its hyper-parameters, it is not made,
    and the weights are read.
    """
    model, mark = net(), tmp_path / "mark"
    path = saved(tmp_path, lightning(model, payload=payloads(mark)[name]), "evil.ckpt")
    assert same(read_weights(path), model.state_dict())
    assert not mark.exists()


@pytest.mark.parametrize("name", payloads(Path("mark")))
def test_a_payload_is_a_real_one(name: str, tmp_path: Path) -> None:
    """Plain unpickling does create the file, so that the test above would see it."""
    mark = tmp_path / "mark"
    with contextlib.suppress(AttributeError):  # eval's result is no tensor
        pickle.loads(pickle.dumps(payloads(mark)[name], 2)).close()
    assert mark.exists()


def text(value: str) -> bytes:
    """Return the opcode that puts a text on the stack."""
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


# What no pickler writes: mark -> the opcodes of a program.
PROGRAMS: dict[str, Callable[[str], bytes]] = {
    "a dotted name": lambda mark: (
        b"\x80\x04"
        + text("os")
        + text("path.os.system")
        + b"\x93"
        + text(f"touch {mark}")
        + b"\x85R."
    ),
    "an instance of old": lambda mark: b"(" + text(f"touch {mark}") + b"ios\nsystem\n.",
    "an object of old": lambda mark: b"(cos\nsystem\n" + text(f"touch {mark}") + b"o.",
    "a new object": lambda mark: b"cos\nsystem\n" + text(f"touch {mark}") + b"\x85\x81.",
}


def program(tmp_path: Path, opcodes: bytes) -> str:
    """Return a file as torch.save writes it, with a pickle of our own in it."""
    with zipfile.ZipFile(saved(tmp_path, {}, "empty.pt")) as whole:
        records = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(tmp_path / "evil.ckpt", "w", zipfile.ZIP_STORED) as file:
        for name, content in records.items():
            file.writestr(name, opcodes if name.endswith("/data.pkl") else content)
    return str(tmp_path / "evil.ckpt")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_never_runs(name: str, tmp_path: Path) -> None:
    """Opcodes that no pickler writes do not run anything either, and end in our words."""
    mark = tmp_path / "mark"
    with pytest.raises(CheckpointError, match="evil.ckpt"):
        read_weights(program(tmp_path, PROGRAMS[name](str(mark))))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._tensor _rebuild_from_type_v2",
    ],
)
def test_a_known_name_leads_to_nothing_that_can_be_changed(name: str) -> None:
    """A pickle cannot set attributes of the functions that it may call:
    later readers would see them.
    """
    opcodes = (
        b"c"
        + name.replace(" ", "\n").encode()
        + b"\n(N}"
        + text("_function")
        + b"cos\nsystem\nstb."
    )
    with pytest.raises(pickle.UnpicklingError, match="sets '_function' of a function"):
        safe_unpickler.Unpickler(io.BytesIO(opcodes)).load()


@pytest.mark.parametrize(
    "module", ["collections", "torch._utils", "torch", "builtins", "os", "torch.nn.modules.linear"]
)
def test_no_name_leads_to_anything_of_elsewhere(module: str) -> None:
    """For each public and private name of these modules the unpickler
    gives a stand-in or a function of its own.
    """
    unpickler = safe_unpickler.Unpickler(io.BytesIO())
    names = [*vars(importlib.import_module(module)), "a.b", ""]
    assert len(names) > 20
    for found in (unpickler.find_class(module, name) for name in names):
        assert type(found) is safe_unpickler._Function or safe_unpickler.StandIn in found.__mro__


@pytest.mark.parametrize("class_first", [True, False])
def test_a_tensor_beyond_its_storage_is_refused(class_first: bool, tmp_path: Path) -> None:
    """A tensor that claims more numbers than the file has is reported as damage,
    and reads no foreign memory.
    """
    rebuild, (storage, *_) = torch.ones(4).__reduce_ex__(2)[:2]
    far = {
        "state_dict": {
            "a": Calls(rebuild, storage, 2, (9,), (1,), False, collections.OrderedDict())
        }
    }
    other = {"other": Settings(1.0)}
    with pytest.raises(CheckpointError, match="RuntimeError: .*(out of bounds|not resizable)"):
        read_weights(saved(tmp_path, other | far if class_first else far | other))
