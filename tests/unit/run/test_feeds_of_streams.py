"""Streams of several ranks with different batches: one contract for all, or a refusal, but never one for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, quiet, rows, weights
from trainkit.errors import ConfigError

x_NI, y_NO = rows(20).tensors
UNLIKE: dict[str, list[list[Any]]] = {
    "other sizes": [[(x_NI[:8], y_NO[:8])], [(x_NI[8:10], y_NO[8:10])]],
    "nothing on one rank": [[(x_NI[:8], y_NO[:8])], []],
}


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
def test_ranks_of_unlike_streams_share_one_contract(data: list[list[Any]], tmp_path: Path) -> None:
    """The batch is unknown then: the factor is that of the ranks, and all ranks keep the same weights."""

    def work(engine: ThreadEngine) -> tuple[torch.Tensor, float, int | None]:
        task, trainer = Line(), quiet(tmp_path, engine=engine)
        trainer.fit(task, data[engine.place])
        return weights(task), trainer.batch_plan.lr_factor, trainer.batch_plan.batch_size

    first, second = World(2).run(work)
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:] == (2, None)


@pytest.mark.parametrize("data", UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize("setting", ["global_batch_size", "lr_reference_batch_size"])
def test_what_needs_a_known_batch_is_refused(data: list[list[Any]], setting: str, tmp_path: Path) -> None:
    """A size that nothing can be related to is refused on all ranks alike."""

    def work(engine: ThreadEngine) -> str:
        with pytest.raises(ConfigError) as error:
            quiet(tmp_path, engine=engine, **{setting: 16}).fit(Line(), data[engine.place])
        return str(error.value)

    told = World(2).run(work)
    assert told[0] == told[1]
    assert "of unknown size" in told[0]
