"""The bytes of a rank under layouts: its parts of the state, and what a step holds beside them.

    torchrun --nproc-per-node 2 memory.py OUT

Rank 0 saves {layout: [rank 0's bytes, ...]}.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import trainkit
from recipes.gpt import GPT
from recipes.language_model import LanguageModel
from trainkit.device.shards import local_of
from trainkit.engine.select import make_engine
from trainkit.extensions.plan.layouts import Layout
from trainkit.extensions.plan.living import Living

LAYOUTS = {
    "fsdp": Layout(2, "fsdp"),
    "fsdp, 2 microbatches": Layout(2, "fsdp", accumulate=2),
    "fsdp, ZeRO 2": Layout(2, "fsdp", gathers_once=True),
    "fsdp, checkpointing": Layout(2, "fsdp", recomputes=True),
    "tensor": Layout(2, "fsdp", tensor=2),
    "tensor, 2 microbatches": Layout(2, "fsdp", tensor=2, accumulate=2),
    "pipeline, 4 microbatches": Layout(2, "fsdp", pipeline=2, accumulate=4),
    "pipeline, checkpointing": Layout(2, "fsdp", pipeline=2, accumulate=4, recomputes=True),
    "pipeline, 2 stages a rank": Layout(
        2, "fsdp", pipeline=2, schedule="interleaved_1f1b", chunks=2, accumulate=4
    ),
    "context": Layout(2, "fsdp", context=2),
    "context, 2 microbatches": Layout(2, "fsdp", context=2, accumulate=2),
}
TOKENS, WORDS, SAMPLES = 64, 256, 4


def make_task() -> LanguageModel:
    """Return a small language model under AdamW."""
    torch.manual_seed(0)
    model = GPT(vocab_size=WORDS, context=TOKENS, width=64, depth=4, heads=4)
    return LanguageModel(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))


def make_data() -> DataLoader[Any]:
    """Return rows of tokens."""
    return DataLoader(torch.randint(0, WORDS, (256, TOKENS + 1)), SAMPLES)  # type: ignore[arg-type]


class Resized(Living):
    """As Living, also of memory that FSDP2 drops and takes again for the same tensor."""

    def __init__(self, apart: Sequence[Tensor]) -> None:
        super().__init__(apart)
        self._memories: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: Tensor) -> None:
        """See Living."""
        memory = local_of(tensor).untyped_storage()
        if memory._cdata not in self._apart:
            self._memories[memory._cdata] = weakref.ref(memory)

    def __torch_dispatch__(self, *given: Any, **kwargs: Any) -> Any:
        """See Living."""
        outputs = super().__torch_dispatch__(*given, **kwargs)
        alive = {key: memory() for key, memory in self._memories.items()}
        self._memories = {key: self._memories[key] for key, own in alive.items() if own is not None}
        self.peak = max(self.peak, sum(own.nbytes() for own in alive.values() if own is not None))
        return outputs


class Watch(trainkit.Callback):
    """Takes the bytes of the third step."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._living: Any = None

    def on_train_step_start(self, trainer: Any, task: Any, *more: Any) -> None:
        """Begin."""
        if trainer.global_step == 2:
            states = [s for own in trainer.optimizers for s in own.state.values()]
            state = [v for own in states for v in own.values() if isinstance(v, Tensor)]
            weights = [*task.parameters(), *task.buffers()]
            self.bytes = {"weights": size_of(weights), "optimizer": size_of(state)}
            self._living = Resized([own for own in (*weights, *state) if not own.is_meta])
            self._living.__enter__()

    def on_before_optimizer_step(self, trainer: Any, task: Any, *more: Any) -> None:
        """End: the activations are gone, and the gradients there."""
        if self._living is not None:
            self._living.__exit__(None, None, None)
            gradients = [own.grad for own in task.parameters() if own.grad is not None]
            self.bytes |= {"gradients": size_of(gradients), "step": self._living.peak}
            self._living = None


def size_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of this rank's parts."""
    return sum(local_of(own).numel() * own.element_size() for own in tensors if not own.is_meta)


def measured(layout: Layout, folder: Path) -> dict[str, int]:
    """Train three steps."""
    watch = Watch()
    options: dict[str, Any] = {
        "reshard_after_forward": False if layout.gathers_once else None,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "pipeline_schedule": layout.schedule,
        "pipeline_chunks": layout.chunks if layout.chunks > 1 else None,
        "context": layout.context,
    }
    trainer = trainkit.Trainer(
        engine=make_engine("fsdp", **options),
        run_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=3,
        accumulate_grad_batches=layout.accumulate,
        activation_checkpointing=layout.recomputes,
        lr_scaling="none",
        limit_val_batches=0,
        callbacks=[watch],
    )
    trainer.fit(make_task(), make_data())
    return watch.bytes


if __name__ == "__main__":
    out = Path(sys.argv[1])
    results = {}
    with make_engine("fsdp") as engine:
        for place, (name, layout) in enumerate(LAYOUTS.items()):
            own = measured(layout, out.parent / str(place))
            results[name] = engine.comm.all_gather_object(own)
        if engine.ranks.is_main:
            torch.save(results, out)
        engine.comm.barrier()
