"""Weights into a model: all of them or none, or the matching ones and a list of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.foreign_files import net, same, saved
from tests.helpers.toy import Line
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.errors import CheckpointError


def kept(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_all_weights_are_loaded() -> None:
    """Parameters and buffers take the values, and no mismatch is returned."""
    model, source = net(1), net(2).state_dict()
    assert load_into(model, source, "w.pt") == []
    assert same(model.state_dict(), source)
    assert all(p.requires_grad for p in model.parameters())


def test_weights_are_cast() -> None:
    """A model of another type keeps its type."""
    model, source = net(1).double(), net(2).state_dict()
    load_into(model, source, "w.pt")
    assert same(
        model.state_dict(),
        {n: t.double() if t.is_floating_point() else t for n, t in source.items()},
    )


def test_what_does_not_fit_is_listed_and_nothing_is_loaded() -> None:
    """With strict, one mismatch is an error:
    it names each kind by name and shape, and the model is unchanged.
    """
    model, source = net(1), net(2).state_dict()
    before = kept(model)
    source["0.bias"] = torch.zeros(7)
    source["extra"] = torch.zeros(2, 1)
    del source["2.bias"]
    with pytest.raises(CheckpointError) as said:
        load_into(model, source, "w.pt")
    assert str(said.value).splitlines() == [
        "w.pt does not fit Sequential:",
        "  missing in the file: 2.bias [2]",
        "  not in the model: extra [2, 1]",
        "  other shape: 0.bias is [7] in the file and [4] in the model",
        "strict=false loads the matching weights.",
    ]
    assert same(model.state_dict(), before)


def test_six_mismatches_are_shown_and_the_rest_counted() -> None:
    """A model that is another one altogether does not fill the screen."""
    source = {f"x{i}": torch.zeros(1) for i in range(9)} | {"0.bias": torch.zeros(4)}
    with pytest.raises(CheckpointError) as said:
        load_into(net(), source, "w.pt")
    assert len(str(said.value).splitlines()) == 1 + 6 + 1 + 1
    assert "  and 11 more" in str(said.value)


def test_without_strict_matching_weights_are_loaded_and_the_rest_is_returned() -> None:
    """Weights that match by name and shape are loaded, the rest keeps its values,
    and each mismatch is returned.
    """
    model, source = net(1), net(2).state_dict()
    before = kept(model)
    source["2.weight"] = torch.zeros(9, 4)
    del source["2.bias"]
    assert load_into(model, source, "w.pt", strict=False) == [
        "missing in the file: 2.bias [2]",
        "other shape: 2.weight is [9, 4] in the file and [2, 4] in the model",
    ]
    old = {"2.weight": before["2.weight"], "2.bias": before["2.bias"]}
    assert same(model.state_dict(), source | old)


@pytest.mark.parametrize("strict", [True, False])
def test_when_nothing_fits_it_is_an_error(strict: bool) -> None:
    """Weights of which none fits are never loaded in silence."""
    with pytest.raises(
        CheckpointError, match=r"^Nothing in w.pt fits Sequential, by name and shape:\n  missing"
    ):
        load_into(net(), {"other": torch.zeros(1)}, "w.pt", strict)


def test_weights_of_a_part_are_recognized() -> None:
    """Names that lack the part's own name in front say so."""
    with pytest.raises(CheckpointError, match="those of its part 'model': load them into that"):
        load_into(
            nn.ModuleDict({"model": nn.Linear(3, 1)}),
            nn.Linear(3, 1).state_dict(),
            "w.pt",
            strict=False,
        )


def test_a_tied_tensor_needs_one_name() -> None:
    """A file that holds a shared tensor once, under either name, is whole."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    for name in ("a.weight", "b.weight"):
        value = torch.rand(2, 2)
        assert load_into(model, {name: value}, "w.pt") == []
        assert torch.equal(model["a"].weight, value)


def test_two_tensors_for_a_tied_one_are_reported() -> None:
    """A file with different values under both names of one tensor does not fit:
    one of them would be lost.
    """
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    with pytest.raises(
        CheckpointError, match="one tensor in the model, two in the file: a.weight and b.weight"
    ):
        load_into(model, {"a.weight": torch.zeros(2, 2), "b.weight": torch.ones(2, 2)}, "w.pt")


def test_a_model_with_a_part_called_module_gets_its_weights_back(tmp_path: Path) -> None:
    """The name part `module` is restored if it is the model's own and not a wrapper's."""
    model = nn.ModuleDict({"module": net(1)})
    path = saved(tmp_path, kept(model))
    other = nn.ModuleDict({"module": net(2)})
    assert load_into(other, read_weights(path), path) == []
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("part", ["net", "module"])
def test_a_part_that_was_compiled_and_one_that_was_not_fit_each_other(
    part: str, tmp_path: Path
) -> None:
    """A Task that compiles a part in its __init__ takes its own weights back, from a file and from
    a checkpoint, and so does the same Task without torch.compile.
    """
    compiled = nn.ModuleDict({part: torch.compile(net(1))})
    expected = list(compiled.state_dict().values())
    (tmp_path / "one").mkdir()
    state = ckpt.find_aliases(compiled.state_dict())
    ckpt.write(tmp_path / "one", ckpt.Snapshot(*state, None, {}))
    for path in (saved(tmp_path, kept(compiled)), str(tmp_path / "one")):
        for inner in (net(2), torch.compile(net(2))):
            other = nn.ModuleDict({part: inner})
            assert load_into(other, read_weights(path), path) == []
            own = other.state_dict().values()
            assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_what_a_loose_load_leaves_out_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """load_from_checkpoint(strict=False) names the weights that it did not load."""
    state = Line().state_dict()
    torch.save(state | {"model.weight": torch.zeros(2, 2)}, tmp_path / "weights.pt")
    Line.load_from_checkpoint(tmp_path / "weights.pt", strict=False)
    out = capsys.readouterr().out
    assert "without those that do not match:\n  other shape: model.weight is [2, 2]" in out
    torch.save(state, tmp_path / "weights.pt")
    Line.load_from_checkpoint(tmp_path / "weights.pt", strict=False)
    assert capsys.readouterr().out == ""
