"""Runs the behaviours of two ranks in one trainer, and saves what each returns:

torchrun --nproc-per-node 2 on_ranks.py lightning FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.same_names.kit import Framework
from tests.same_names.kits import lightning_kit, trainkit_kit
from tests.same_names.ranks import ROWS_OF_RANKS


class OnRanks(Framework):
    """A Trainer that takes both ranks."""

    __slots__ = ()

    def trainer(self, **settings: Any) -> Any:
        """Return it; the rate stays as it is."""
        ranks: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
        if self.name == "trainkit":
            ranks["lr_scaling"] = "none"
        return super().trainer(**ranks | settings)


def main() -> None:
    """Run all rows."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    kit = OnRanks(*(lightning_kit if name == "lightning" else trainkit_kit)(folder / name))
    results: dict[str, Any] = {}
    for row in ROWS_OF_RANKS:
        kit = kit._replace(folder=folder / name / row.run.__name__)
        try:
            results[row.name] = row.run(kit)
        except Exception as error:
            results[row.name] = f"{type(error).__name__}: {error}"
    file = folder / f"{name}-{torch.distributed.get_rank()}.json"
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
