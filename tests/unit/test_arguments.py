"""Annotations as rules: legal and illegal values, and the words of the errors."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from trainkit.arguments import PositiveInt, checked, illegal, problem, show
from trainkit.errors import ConfigError

LEGAL = [
    ("int", 3),
    ("int", -3),
    ("float", 3),
    ("float", 0.5),
    ("bool", False),
    ("str", "a"),
    ("str", Path("a")),
    ("None", None),
    ("int | None", None),
    ("Optional[int]", 3),
    ("Union[int, str]", "a"),
    ("'int | None'", None),
    ("Annotated[int, 'meters']", 1),
    ("Literal['min', 'max']", "max"),
    ("Literal['a', None]", None),
    ("list[int]", [1, 2]),
    ("Sequence[int]", (1, 2)),
    ("dict[str, int]", {"a": 1}),
    ("PositiveInt", 1),
    ("NonNegativeInt", 0),
    ("PositiveFloat", 1e-9),
    ("NonNegativeFloat", 0),
    ("Fraction", 1),
    ("Fraction", 0.0),
    ("IntOrFraction", 12),
    ("IntOrFraction", 1.0),
    ("trainkit.arguments.PositiveInt | None", 2),
    ("SomeClass", object()),
    ("SomeClass[int]", 1),
]
ILLEGAL = [
    ("int", 1.0, "a whole number"),
    ("int", True, "a whole number"),
    ("float", "0.1", "a number"),
    ("float", float("nan"), "a number"),
    ("bool", 1, "true or false"),
    ("str", 1, "a text"),
    ("int | None", "a", "a whole number or null"),
    ("Literal['min', 'max']", "mean", "one of 'min', 'max'"),
    ("Literal[1, 2]", True, "one of 1, 2"),
    ("Literal['a', None]", 3, "one of 'a', null"),
    ("list[int]", 1, "a list"),
    ("list[int]", [1, "a"], "a list of which each is a whole number"),
    ("dict[str, int]", [1], "a mapping"),
    ("PositiveInt", 0, "a whole number, 1 or more"),
    ("NonNegativeInt", -1, "a whole number, 0 or more"),
    ("PositiveFloat", 0.0, "a number above 0"),
    ("NonNegativeFloat", -0.1, "a number, 0 or more"),
    ("Fraction", 1.1, "a number from 0 to 1"),
    ("IntOrFraction", 1.5, "a whole number (a count), or a fraction from 0.0 to 1.0"),
    ("IntOrFraction", -1, "a whole number (a count), or a fraction from 0.0 to 1.0"),
    ("bool | PositiveInt", 0, "true or false or a whole number, 1 or more"),
    ("ExistingFolder", "/no/such/folder", "an existing folder"),
    ("FolderPath", "", "the path of a folder"),
    ("DeviceName", "gpu", "'auto', 'cpu', 'cuda', 'xpu' or 'mps'"),
    ("Callable[[int], str] | None", "a", "null"),
]


@checked
class Oven:
    """Something with arguments."""

    explained_arguments = {"watts": "an oven has degrees."}

    def __init__(self, degrees: PositiveInt, *, fan: bool = False) -> None:
        self.degrees, self.fan = degrees, fan


@pytest.mark.parametrize(("annotation", "value"), LEGAL)
def test_a_fitting_value_has_no_problem(annotation: str, value: object) -> None:
    """A value within its annotation is accepted."""
    assert problem(annotation, value) is None


@pytest.mark.parametrize(("annotation", "value", "legal"), ILLEGAL)
def test_a_mismatch_names_what_is_legal(annotation: str, value: object, legal: str) -> None:
    """A value outside its annotation gets the legal range in words."""
    assert problem(annotation, value) == legal


def test_an_existing_folder_fits(tmp_path: Path) -> None:
    """ExistingFolder accepts a folder and no file."""
    (tmp_path / "file").touch()
    assert problem("ExistingFolder", str(tmp_path)) is None
    assert problem("ExistingFolder", tmp_path / "file") == "an existing folder"


def test_values_are_shown_as_in_a_config() -> None:
    """Messages write values as a yaml file would."""
    assert [show(v) for v in (None, True, "a", 3, [1])] == ["null", "true", "'a'", "3", "[1]"]


def test_a_missing_folder_has_its_own_message() -> None:
    """For a folder the message says that it does not exist."""
    assert illegal("data.root", "/x", "an existing folder").startswith(
        "data.root is '/x', and there is no such folder."
    )


def test_a_number_in_quotes_is_shown_without_them() -> None:
    """Not where the value is none of the legal ones anyway."""
    assert illegal("a", "2", "a whole number, 1 or more").endswith("or more. Without quotes: 2")
    assert illegal("a", "2", "'x' or 'y'").endswith("'x' or 'y'.")


def test_checked_classes_take_legal_arguments() -> None:
    """A checked constructor works as before, by place and by keyword."""
    assert Oven(3, fan=True).fan
    assert Oven(degrees=3).degrees == 3


@pytest.mark.parametrize("call", [lambda: Oven(0), lambda: Oven(degrees=0)])
def test_checked_classes_refuse_illegal_values(call: object) -> None:
    """An illegal value is refused with key, value and range."""
    with pytest.raises(
        ConfigError, match=r"^Oven\.degrees is 0; it must be a whole number, 1 or more\.$"
    ):
        call()


def test_an_unknown_argument_gets_the_nearest_name() -> None:
    """A misspelt argument is answered with the nearest one and all that there are."""
    with pytest.raises(
        ConfigError,
        match=r"Oven\.degree is not a setting\. Did you mean 'degrees'\? .*degrees, fan",
    ):
        Oven(degree=1)


def test_an_argument_from_elsewhere_is_explained() -> None:
    """An argument that other ovens have gets its own explanation."""
    with pytest.raises(ConfigError, match=r"^Oven\.watts: an oven has degrees\.$"):
        Oven(watts=1)


def test_a_taken_argument_stands_for_others() -> None:
    """A name of other ovens that means something here sets what it means;
    a subclass may take more.
    """

    class Taking(Oven):
        taken_arguments: ClassVar = {
            "celsius": lambda value: {"degrees": value},
            "brand": lambda value: {},
        }

    assert Taking(celsius=3, brand="any").degrees == 3  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^Taking\.degrees is 'x'"):
        Taking(celsius="x")  # type: ignore[call-arg]


def test_a_checked_class_can_be_subclassed() -> None:
    """A subclass with arguments of its own calls the checked constructor like any other."""

    class Grill(Oven):
        def __init__(self, bars: int) -> None:
            super().__init__(degrees=bars * 10)

    assert Grill(2).degrees == 20
