"""RayData without Ray: what is refused, how columns become tensors, which batches a rank takes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trainkit.data import RayData
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.ray.data import RayStream, same_rows


class Table:
    """A Ray Dataset of numbered rows, as RayData uses it, of one process."""

    def __init__(self, num_rows: int = 23) -> None:
        self.num_rows, self.order = num_rows, list(range(num_rows))
        self.context = type("Context", (), {"execution_options": type("Options", (), {})()})()

    def count(self) -> int:
        """Return the rows."""
        return self.num_rows

    def random_shuffle(self, seed: int) -> Table:
        """Return another order."""
        made = Table(self.num_rows)
        made.order = np.random.default_rng(seed).permutation(self.num_rows).tolist()
        return made

    def repartition(self, target_num_rows_per_block: int, strict: bool) -> Table:
        """Return itself: only the batches count here."""
        assert strict
        return self

    def streaming_split(self, n: int, equal: bool) -> list[Any]:
        """Is not called with one rank."""
        raise AssertionError

    def iter_batches(self, batch_size: int, batch_format: str, prefetch_batches: int) -> Any:
        """Yield batches."""
        for start in range(0, self.num_rows, batch_size):
            yield {"id": np.array(self.order[start : start + batch_size])}


@pytest.fixture(autouse=True)
def _connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainkit.extensions.ray.data.connect", lambda address=None: None)


def stream(**settings: Any) -> RayStream:
    """Return a stream of one rank."""
    given = {
        "limit": None,
        "seed": 1,
        "ranks": (0, 1),
        "declared": 1,
        "on_main": lambda function: function(),
    } | settings
    return RayStream(RayData(Table(), 4, ["id"], shuffle=True), **given)


def ids(steps: Any) -> list[int]:
    """Return the samples of steps until the first empty one."""
    return [int(i) for step in itertools.takewhile(bool, steps) for (batch,) in step for i in batch]


def test_an_epoch_has_its_own_order_and_resumes_at_its_place() -> None:
    """Each row once, in another order in each epoch;
    from step 2 on the same rows in the same order.
    """
    made = stream()
    first, second = ids(made.steps(0, 0, 2)), ids(made.steps(1, 0, 2))
    assert sorted(first) == sorted(second) == list(range(23)) and first != second
    assert ids(stream().steps(1, 2, 2)) == second[16:]
    assert made.num_steps(2) == 3


def test_a_limit_ends_an_epoch() -> None:
    """A limit counts batches of each rank."""
    made = stream(limit=3)
    assert len(ids(made.steps(0, 0, 1))) == 12
    assert made.num_steps(1) == 3


def test_columns_become_tensors() -> None:
    """Numbers and nested arrays are tensors, texts and ragged rows lists;
    a missing column is named.
    """
    nested = np.empty(2, dtype=object)
    nested[:] = [np.array([np.ones(2), np.zeros(2)]), np.array([np.ones(2), np.ones(2)])]
    ragged = np.empty(2, dtype=object)
    ragged[:] = [np.ones(2), np.ones(3)]
    lists, apart = (
        np.empty(2, dtype=object),
        np.empty(2, dtype=object),
    )  # blocks of pandas have these
    lists[:], apart[:] = [[1, 2], [3, 4]], [[1], [2, 3]]
    frozen = np.arange(2)
    frozen.flags.writeable = False
    data = RayData(Table(), 2)
    batch = data.batch_of(
        {"id": frozen, "nested": nested, "ragged": ragged, "text": np.array(["a", "b"])}
    )
    assert torch.equal(batch["id"], torch.arange(2)) and batch["nested"].shape == (2, 2, 2)
    assert [len(row) for row in batch["ragged"]] == [2, 3] and batch["text"] == ["a", "b"]
    of_lists = data.batch_of({"lists": lists, "apart": apart})
    assert of_lists["lists"].tolist() == [[1, 2], [3, 4]] and len(of_lists["apart"]) == 2
    with pytest.raises(ConfigError, match="RayData.columns has 'label'; the data has id"):
        RayData(Table(), 2, ["label"]).batch_of({"id": frozen})


def test_what_is_no_data_set_is_refused() -> None:
    """A share of a data set, or any other object, is refused; so is an empty data set."""
    with pytest.raises(
        ConfigError, match="RayData.dataset is a builtins.list; it must be a whole ray.data.Dataset"
    ):
        RayData([1, 2], 2)
    with pytest.raises(ConfigError, match="RayData.batch_size is 0"):
        RayData(Table(), 0)
    with pytest.raises(DataError, match="the data set has no samples"):
        RayStream(RayData(Table(0), 4), None, 1, (0, 1), 1, lambda function: function())


def test_an_error_of_a_reader_is_a_data_error() -> None:
    """What Ray raises becomes one sentence, on all ranks."""

    def read() -> Any:
        raise FileNotFoundError("no such file: a.parquet")

    with pytest.raises(DataError, match="Ray Data: FileNotFoundError: no such file: a.parquet"):
        RayStream(RayData(read, 4), None, 1, (0, 1), 1, lambda function: function())


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command."""
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"Ray Data needs Ray .* pip install 'trainkit\[ray\]'"):
        RayData(Table, 4).num_samples  # noqa: B018


def _shuffle(seed: int | None) -> SimpleNamespace:
    """Return a step as Ray's random_shuffle adds it."""
    return SimpleNamespace(name="RandomShuffle", seed_config=SimpleNamespace(seed=seed))


@pytest.mark.parametrize(("seed", "warns"), [(None, True), (3, False)])
def test_an_order_without_a_seed_is_reported(
    seed: int | None, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that resumes within an epoch would read other samples: random_shuffle() of the user's
    has another order each time.
    """
    table = Table()
    steps = [SimpleNamespace(name="Read"), _shuffle(seed)]
    dag = SimpleNamespace(post_order_iter=lambda: iter(steps))
    table._logical_plan = SimpleNamespace(dag=dag)  # type: ignore[attr-defined]
    data = RayData(table, 4)
    RayStream(data, None, 1, (0, 1), 1, lambda function: function())
    text = capsys.readouterr().out
    assert ("own RandomShuffle has no seed" in text) is warns


def _first_two(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: column[:2] for name, column in batch.items()}


def _in_two(batch: dict[str, Any]) -> Any:
    yield {name: column[:1] for name, column in batch.items()}
    yield {name: column[1:] for name, column in batch.items()}


@pytest.mark.parametrize("transform", [_first_two, lambda batch: _in_two(batch | {"id": [1, 2]})])
def test_a_transform_that_changes_the_number_of_rows_is_refused(transform: Any) -> None:
    """The length of a run, and which batch is whose, are those of the rows before it."""
    with pytest.raises(ValueError, match=r"made 2 rows of 3, .* to the data set, as dataset\.map"):
        same_rows(transform)({"id": np.arange(3)})


@pytest.mark.parametrize(
    "transform", [dict, _in_two, lambda batch: None, lambda batch: 3, lambda batch: [1, 2, 3]]
)
def test_other_transforms_are_left_alone(transform: Any) -> None:
    """As many rows pass, whole or in parts; Ray has its own error for other types."""
    batch = {"id": np.arange(3)}
    made, expected = same_rows(transform)(batch), transform(batch)
    if transform is _in_two:
        assert (
            [len(part["id"]) for part in made] == [1, 2] == [len(part["id"]) for part in expected]
        )
    else:
        assert made == expected


def test_a_check_of_rows_needs_no_trainkit_in_rays_workers() -> None:
    """They may be on nodes without it."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    sent = cloudpickle.dumps(same_rows(len)).hex()
    program = (
        "import pickle, sys; sys.modules['trainkit'] = None;"
        f" print(pickle.loads(bytes.fromhex('{sent}'))({{1: 'a'}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "1\n", done.stderr


class UserCodeException(Exception):
    """As Ray raises it: the transform's own error is in its text alone."""


@pytest.mark.parametrize("cause", ["ValueError: made 2 rows of 3", "my.Bad: no: label", "KeyError"])
def test_an_error_of_a_transform_is_named(cause: str) -> None:
    """It read "UDF failed to process a data block"."""
    text = (
        f'ray::Map() (pid=9)\n  File "a.py", line 2, in f\n    raise It\n{cause}\nmore: text\n\nThe'
        " above exception was the direct cause of the following exception:\n\nray::Map()"
        " (pid=9)\nray.exceptions.UserCodeException: UDF failed to process a data block.\nTo change"
    )

    class Failing(Table):
        def iter_batches(self, batch_size: int, batch_format: str, prefetch_batches: int) -> Any:
            raise UserCodeException(text)

    with pytest.raises(DataError, match=rf"^Ray Data: {cause}$"):
        list(RayData(Failing(), 4))
