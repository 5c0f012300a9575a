"""The state of `random` as bytes: what it restores is what getstate and setstate would."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.data import python_random
from trainkit.data.python_random import is_plain_memory, restore_python, save_python


@pytest.mark.parametrize("kind", [python_random._Memory, python_random._Portable])
def test_a_restored_generator_draws_the_same(kind: Any) -> None:
    """From any place, normals in pairs included."""
    generator = random.Random(3)
    state = kind(generator)
    for warm in (0, 1, 5, 623, 624, 1000):
        for _ in range(warm):
            generator.random()
        generator.gauss(0, 1)
        saved, known = state.save(), generator.getstate()
        drawn = [generator.gauss(0, 1) for _ in range(900)]
        assert state.save() != saved
        state.restore(saved)
        assert generator.getstate() == known
        assert state.save() == saved
        assert [generator.gauss(0, 1) for _ in range(900)] == drawn


def test_the_modules_own_functions_are_restored() -> None:
    """Those of `random`, as they are imported."""
    saved = save_python()
    drawn = random.random(), random.randint(0, 99), random.gauss(0, 1)
    restore_python(saved)
    assert (random.random(), random.randint(0, 99), random.gauss(0, 1)) == drawn


def test_cpython_keeps_it_in_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by trying; a generator of another size, or one that memory does not restore,
    takes the public functions.
    """
    assert is_plain_memory()
    with monkeypatch.context() as patch:
        patch.setattr(python_random._Memory, "restore", lambda self, state: None)
        assert not is_plain_memory()
    monkeypatch.setattr(python_random, "object", SimpleNamespace(__basicsize__=999), raising=False)
    assert not is_plain_memory()
