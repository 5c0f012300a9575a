"""What cannot work if each rank holds a part of the weights (engine=fsdp); refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from trainkit.errors import ConfigError
from trainkit.run.setup import Stage


def check_split(stage: Stage) -> None:
    """Refuse settings that need whole weights on each rank.

    Raises:
        ConfigError: one is set.
    """
    if stage.engine.splits_weights and (reason := next(_reasons(stage), None)):
        raise ConfigError(f"engine is {stage.engine.name}, and its ranks hold parts of the weights; {reason}")


def _reasons(stage: Stage) -> Iterator[str]:
    numerics, task = stage.options.numerics, stage.task
    if stage.is_elastic:
        yield (
            "the job is elastic: the part of a rank that is lost would be lost too. Start with torchrun, and let it resume "
            "from the checkpoint: torchrun --max-restarts 3, with resume=auto run_dir=runs/mine."
        )
    if numerics.halve_batch_on_oom:
        yield (
            "trainer.halve_batch_on_oom is true: a rank that runs out of memory leaves the others inside a gather. Leave it "
            "out; engine.cpu_offload=true, trainer.activation_checkpointing=true or a smaller data.batch_size save memory."
        )
    if stage.options.samples.limit is not None:
        yield (
            "on_bad_sample is 'skip': a rank whose microbatch is all bad would run no forward, and the others wait for it. "
            "Leave it out."
        )
    if not task.automatic_optimization:
        yield "the Task updates its weights itself (automatic_optimization=False). Use engine=ddp, or automatic optimization."
    if numerics.sync_batchnorm:
        yield (
            "trainer.sync_batchnorm is true: a rank without samples runs its forward on borrowed ones, which would count in "
            "the statistics. Use a norm that needs no batch (LayerNorm, GroupNorm), or engine=ddp."
        )
    for name, module in task.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield f"'{name}' has sparse gradients (sparse=True), which are not split. Use sparse=False, or engine=ddp."
