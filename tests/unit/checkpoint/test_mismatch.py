"""Weights that do not fit are listed in a few lines, however many they are."""

from __future__ import annotations

from pathlib import Path

from trainkit.checkpoint.mismatch import listed, mismatches, unfit


def test_each_kind_of_mismatch_has_its_line() -> None:
    """Only in the checkpoint, only in the model, and of another shape, with the shapes."""
    there, here = {"a": (2, 3), "b": (4,), "c": (1,)}, {"a": (2, 4), "c": (1,), "d": ()}
    assert mismatches(there, here) == [
        "missing in the checkpoint: d []",
        "not in the model: b [4]",
        "other shape: a is [2, 3] in the checkpoint and [2, 4] in the model",
    ]
    assert mismatches(there, there) == []


def test_hundreds_of_mismatches_fit_on_a_screen() -> None:
    """Six are shown, the others counted; each line is short, and the last says what to do."""
    names = {f"layers.{number}.weight": (64, 64) for number in range(300)}
    text = str(unfit(Path("runs/a/checkpoints/last"), mismatches({}, names)))
    assert len(text.splitlines()) == 9 and "and 294 more" in text
    assert max(map(len, text.splitlines())) < 240
    assert text.endswith("init_weights=runs/a/checkpoints/last strict=false.")


def test_modules_that_hooks_add_later_have_their_place_named() -> None:
    """If the checkpoint has weights that the model lacks, and there is no other mismatch."""
    place = Path("runs/a/checkpoints/last")
    later = str(unfit(place, mismatches({"head": (2,)}, {})))
    assert later.endswith("in __init__, setup or configure_model: other hooks run later.")
    assert "other hooks" not in str(unfit(place, mismatches({"head": (2,)}, {"head": (3,)})))


def test_a_few_are_all_shown() -> None:
    """Without a count of others."""
    assert listed(["one", "two"]) == "  one\n  two"
