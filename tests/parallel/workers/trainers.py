"""The trainer of a scenario whose weights are compared with one process's, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trainkit
from trainkit.engine.select import make_engine


def exact_trainer(
    engine: tuple[str, dict[str, Any]], run_dir: Path, **settings: Any
) -> trainkit.Trainer:
    """Return a trainer that prints and logs nothing.

    Args:
        engine: its name and options.
        run_dir: of the scenario.
        settings: of the Trainer.
    """
    return trainkit.Trainer(
        engine=make_engine(engine[0], **engine[1]),  # type: ignore[arg-type]
        precision="64-true",
        lr_scaling="none",
        run_dir=str(run_dir),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
