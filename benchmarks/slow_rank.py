"""One rank of the benchmark of approximate communication: trains the gpt recipe under each setting.
See slow_link.py.

    torchrun --nproc-per-node 2 -m benchmarks.slow_rank FOLDER '[["exact", {}, 300]]'

Each setting is [kind, arguments, steps]; the text is FOLDER/text/**/*.py. Rank 0 writes
FOLDER/result.json: for each setting the losses of validations, seconds and bytes so far.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import trainkit
from benchmarks.links import bytes_so_far
from recipes.gpt import GPT, TextBytes
from recipes.language_model import LanguageModel
from trainkit.api.callback import Callback
from trainkit.engine.select import make_engine
from trainkit.optim import cosine

BATCH, CONTEXT, VALIDATIONS = 2, 128, 5
KINDS: dict[str, Any] = {
    "powersgd": trainkit.PowerSGD,
    "local_sgd": trainkit.LocalSGD,
    "diloco": trainkit.DiLoCo,
}


class Notes(Callback):
    """Records loss, seconds and bytes at each validation;
    the seconds and bytes of validations do not count.
    """

    def __init__(self) -> None:
        self.noted: list[dict[str, float]] = []
        self._seconds = self._bytes = 0.0

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Start the clock, on all ranks at once."""
        trainer.engine.comm.barrier()
        self._go()

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        """Stop it: the outer step that a validation forces is included."""
        if not trainer.sanity_checking:
            trainer.engine.comm.barrier()
            self._seconds += time.perf_counter() - self._since
            self._bytes += counted() - self._bytes_since

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        """Note, and start it again."""
        if not trainer.sanity_checking:
            own = {"step": trainer.global_step, "seconds": self._seconds, "bytes": self._bytes}
            self.noted.append(own | {"loss": float(trainer.callback_metrics["val/loss"])})
            trainer.engine.comm.barrier()
            self._go()

    def _go(self) -> None:
        self._since, self._bytes_since = time.perf_counter(), counted()


def counted() -> float:
    """Return the bytes over the link so far; 0 where there is none."""
    try:
        return bytes_so_far()
    except OSError:
        return 0.0


def train(kind: str, arguments: dict[str, Any], steps: int, folder: Path) -> list[dict[str, float]]:
    """Train conf=gpt's model, optimizer and schedule on its text, with microbatches of BATCH;
    return what was noted.
    """
    trainkit.seed_everything(0)
    settings = dict(arguments)
    lr = settings.pop("lr", 4e-3)
    notes = Notes()
    trainer = trainkit.Trainer(
        communication=KINDS[kind](**settings) if kind in KINDS else kind,
        max_steps=steps,
        lr_scaling="sqrt",
        lr_warmup_steps=min(20, steps // 2),
        gradient_clip_val=1.0,
        val_check_interval=max(1, steps // VALIDATIONS),
        num_sanity_val_steps=0,
        limit_val_batches=50,
        callbacks=[notes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=str(folder / "run"),
    )
    optimizer = partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    task = LanguageModel(GPT(context=CONTEXT), optimizer, partial(cosine, end=0.0))
    trainer.fit(task, datamodule=TextBytes(str(folder / "text"), "**/*.py", BATCH, CONTEXT))
    return notes.noted


def worker(folder: Path, settings: list[Any]) -> None:
    """Train under each setting in turn; rank 0 writes after each."""
    torch.set_num_threads(1)
    results = []
    with make_engine("auto") as engine:
        for kind, arguments, steps in settings:
            results.append(
                {
                    "kind": kind,
                    "arguments": arguments,
                    "noted": train(kind, arguments, steps, folder),
                }
            )
            if engine.ranks.is_main:
                (folder / "result.json").write_text(json.dumps(results))
                print(kind, arguments, results[-1]["noted"], flush=True)
            engine.comm.barrier()


if __name__ == "__main__":
    worker(Path(sys.argv[1]), json.loads(sys.argv[2]))
