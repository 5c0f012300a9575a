"""Names of Lightning that trainkit does not have, each with its replacement, and the sentence for an
object of Lightning where one of trainkit is needed.
"""

from __future__ import annotations

from collections.abc import Callable

_LAUNCHER_DECIDES = (
    "trainkit has no such setting: the launcher decides where a run runs. Start N processes with"
    " `horovodrun -np N ...` or `torchrun --nproc-per-node N ...`; choose the framework with"
    " engine=auto|single|horovod|ddp. A notebook is one process, so it trains on one rank: for"
    " more, write the code to a file (%%writefile train.py) and start it from a cell (!horovodrun"
    " -np 2 python train.py)."
)

TRAINER_ARGUMENTS: dict[str, str] = {
    "devices": _LAUNCHER_DECIDES,
    "num_nodes": _LAUNCHER_DECIDES,
    "strategy": _LAUNCHER_DECIDES,
    "default_root_dir": "trainkit calls it run_dir: the folder of one run.",
    "gpus": _LAUNCHER_DECIDES,
    "resume_from_checkpoint": (
        "pass it where training starts: fit(task, ckpt_path=...); at the command line"
        " ckpt_path=last, ckpt_path=PATH or resume=auto."
    ),
    "checkpoint_callback": (
        "trainkit calls it enable_checkpointing: true or false; a ModelCheckpoint goes into"
        " callbacks."
    ),
    "use_distributed_sampler": "data is sharded over ranks, each sample once; leave it out.",
}

# Without effect here: nothing logged keeps its graph, and a metric object is found without its
# attribute's name.
LOG_IGNORES = ("enable_graph", "metric_attribute")

LOG_ARGUMENTS: dict[str, str] = {
    "sync_dist_group": "leave it out: an epoch's value is always that of all ranks that train.",
}


def of_another_class(
    place: str, value: object, kind: str, has: Callable[[str], bool] = lambda name: False
) -> str:
    """Return the sentence for an object that is not of a class of trainkit.

    Args:
        place: the start of the sentence, as "trainer.callbacks has".
        value: the object, of Lightning or any other.
        kind: the name of the class of trainkit that it must have, as "Callback".
        has: whether trainkit has a class with this name of Lightning's too.
    """
    if isinstance(value, type):
        return f"{place} the class {value.__name__}; give an object of it: {value.__name__}(...)."
    own = type(value).__name__
    base = next(
        (
            each.__name__
            for each in type(value).__mro__
            if each.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        ),
        None,
    )
    ours = f"trainkit.{base if base and has(base) else kind}"
    if base is None:
        return f"{place} a {own}; it must be a {ours}."
    if base != own:
        return (
            f"{place} a {own}, whose base is Lightning's {base}. Make {ours} its base class:"
            " methods and hooks have the same names (docs/lightning.md)."
        )
    if has(base):
        return f"{place} Lightning's {own}. Use {ours}: its arguments have the same names."
    return (
        f"{place} Lightning's {own}, which trainkit does not have. docs/lightning.md names what"
        f" it has in its place; or write your own as a {ours}: the hooks have the same names."
    )
