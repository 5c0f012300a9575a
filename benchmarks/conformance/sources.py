"""What trainers do not have, by their own pages; and the public thread of each known failure."""

from __future__ import annotations

from typing import NamedTuple

_LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"
_ACCELERATE = "https://github.com/huggingface/accelerate"
_TRANSFORMERS = "https://github.com/huggingface/transformers"
_IGNITE = "https://github.com/pytorch/ignite"
_KERAS = "https://github.com/keras-team/keras"
_TORCH = "https://github.com/pytorch/pytorch"
_SAVING = "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html"
_DDP = "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html"


class Declared(NamedTuple):
    """A cell that no program can check.

    Attributes:
        text: what the trainer does not have.
        url: its page or thread that says so.
    """

    text: str
    url: str


_KERAS_RANKS = Declared(
    "fit on several processes is not documented on the torch backend: its guide replaces fit by a"
    " loop of one's own",
    "https://keras.io/guides/distributed_training_with_torch/",
)
_NO_BEST = Declared(
    "a plain loop has neither; what it does is what its author wrote",
    "https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html",
)
_NO_CONFIG = Declared(
    "it reads no config file that names classes", "https://docs.pytorch.org/docs/stable/index.html"
)
_RANKS = (
    "resume-on-another-number-of-ranks",
    "tokens-over-ranks",
    "uneven-ranks-samples",
    "uneven-ranks-gradient",
    "evaluation-over-ranks",
    "training-loss-over-ranks",
    "metric-object-over-ranks",
    "ranks-are-a-larger-batch",
    "order-does-not-depend-on-ranks",
    "augmentation-differs-over-ranks",
    "ranks-start-equal",
    "clipping-over-ranks",
    "batch-norm-over-ranks",
    "schedule-over-ranks",
    "a-rank-is-killed",
    "a-rank-raises",
    "a-rank-hangs",
    "a-signal-to-one-rank",
)
_OF_CALLBACKS = (
    "resume-best-score",
    "resume-patience",
    "nan-is-never-the-best",
    "nan-first-is-not-the-best",
    "nan-is-no-improvement",
)

DECLARED: dict[tuple[str, str], Declared] = {
    **{("Keras", name): _KERAS_RANKS for name in _RANKS},
    **{(who, name): _NO_BEST for who in ("by hand", "Accelerate") for name in _OF_CALLBACKS},
    **{
        (who, "a-config-runs-no-command"): _NO_CONFIG
        for who in ("by hand", "Accelerate", "transformers", "ignite", "Keras")
    },
    ("by hand", "metric-object-over-ranks"): Declared(
        "PyTorch has no metric objects", "https://docs.pytorch.org/docs/stable/index.html"
    ),
    ("transformers", "resume-two-optimizers"): Declared(
        "one optimizer a Trainer", "https://huggingface.co/docs/transformers/main_classes/trainer"
    ),
    ("transformers", "resume-ema"): Declared(
        "no average of the weights",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    ),
    ("transformers", "resume-ema-inside-an-epoch"): Declared(
        "no average of the weights",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    ),
    ("transformers", "batch-norm-over-ranks"): Declared(
        "no option for it", "https://huggingface.co/docs/transformers/main_classes/trainer"
    ),
    ("Accelerate", "schedule-and-a-skipped-update"): Declared(
        "float16 has a loss scale on accelerators only, and this suite runs on the CPU",
        "https://huggingface.co/docs/accelerate/concept_guides/low_precision_training",
    ),
    ("Lightning", "schedule-and-a-skipped-update"): Declared(
        "16-mixed has a loss scale on GPUs only, and this suite runs on the CPU; on GPUs see the"
        " thread",
        f"{_LIGHTNING}/issues/5558",
    ),
    ("transformers", "schedule-and-a-skipped-update"): Declared(
        "fp16 has a loss scale on GPUs only, and this suite runs on the CPU",
        "https://huggingface.co/docs/transformers/perf_train_gpu_one",
    ),
    ("Keras", "schedule-and-a-skipped-update"): Declared(
        "its loss scale, LossScaleOptimizer, is an optimizer of its own policy; no program yet maps"
        " the Fit to it",
        "https://keras.io/api/optimizers/loss_scale_optimizer/",
    ),
}

# (trainer, claim) -> the thread of that failure; claims of one cause share a thread.
_MIDDLE = (
    "resume-samples",
    "resume-weights",
    "resume-twice",
    "resume-with-workers",
    "resume-augmentation",
    "resume-a-stream",
    "resume-accumulation",
    "resume-ema-inside-an-epoch",
    "resume-two-optimizers",
    "resume-on-another-number-of-ranks",
)
_ENDS = (
    "resume-at-an-epochs-end",
    "resume-ema",
    "resume-past-a-torn-checkpoint",
    "resume-after-a-kill-while-saving",
)
THREADS: dict[tuple[str, str], str] = {
    **{("Lightning", name): f"{_LIGHTNING}/issues/19764" for name in _MIDDLE},
    **{("Lightning", name): f"{_LIGHTNING}/issues/17543" for name in _ENDS},
    **{("Accelerate", name): f"{_ACCELERATE}/issues/2016" for name in (*_MIDDLE, *_ENDS)},
    **{("ignite", name): f"{_IGNITE}/issues/62" for name in (*_MIDDLE, *_ENDS)},
    **{("Keras", name): f"{_KERAS}/pull/22490" for name in (*_MIDDLE, *_ENDS)},
    **{("by hand", name): _SAVING for name in (*_MIDDLE, *_ENDS)},
    ("transformers", "resume-past-a-torn-checkpoint"): f"{_TRANSFORMERS}/issues/35782",
    ("transformers", "resume-after-a-kill-while-saving"): f"{_TRANSFORMERS}/issues/35782",
    ("transformers", "resume-on-another-number-of-ranks"): f"{_TRANSFORMERS}/issues/14554",
    ("transformers", "nan-is-reported"): "https://github.com/huggingface/trl/issues/6702",
    ("Lightning", "tokens-over-accumulation"): f"{_LIGHTNING}/issues/20350",
    ("Lightning", "tokens-over-ranks"): f"{_LIGHTNING}/issues/20350",
    ("Lightning", "short-last-window"): f"{_LIGHTNING}/issues/19987",
    ("Lightning", "short-last-batch"): f"{_LIGHTNING}/issues/19987",
    ("Lightning", "uneven-ranks-samples"): f"{_LIGHTNING}/issues/3325",
    ("Lightning", "uneven-ranks-gradient"): f"{_LIGHTNING}/issues/3325",
    ("Lightning", "evaluation-over-ranks"): f"{_LIGHTNING}/issues/7929",
    ("Lightning", "metric-object-over-ranks"): f"{_LIGHTNING}/issues/2398",
    ("Lightning", "schedule-under-accumulation"): f"{_LIGHTNING}/issues/1476",
    ("Lightning", "augmentation-differs-over-ranks"): f"{_LIGHTNING}/issues/16166",
    ("Lightning", "device-reads"): f"{_LIGHTNING}/issues/21487",
    ("Lightning", "a-signal-to-one-rank"): f"{_LIGHTNING}/issues/20806",
    ("Accelerate", "schedule-over-ranks"): f"{_ACCELERATE}/issues/2926",
    ("by hand", "evaluation-over-ranks"): f"{_TORCH}/issues/25162",
    ("by hand", "uneven-ranks-samples"): f"{_TORCH}/issues/22584",
    ("by hand", "uneven-ranks-gradient"): f"{_TORCH}/issues/22584",
    ("ignite", "evaluation-over-ranks"): f"{_TORCH}/issues/25162",
    ("ignite", "metric-object-over-ranks"): f"{_TORCH}/issues/25162",
    ("ignite", "uneven-ranks-samples"): f"{_TORCH}/issues/22584",
    ("ignite", "uneven-ranks-gradient"): f"{_TORCH}/issues/22584",
}

# Pages that programs of one claim follow.
_PROGRAMS = {
    ("Accelerate", "training-loss-of-an-epoch"): (
        f"{_ACCELERATE}/blob/main/examples/complete_nlp_example.py"
    ),
    ("Accelerate", "training-loss-over-ranks"): (
        f"{_ACCELERATE}/blob/main/examples/complete_nlp_example.py"
    ),
}

# Where no thread is known: the page that the program follows.
PAGES = {
    "by hand": _DDP,
    "Lightning": "https://lightning.ai/docs/pytorch/stable/common/trainer.html",
    "Accelerate": "https://huggingface.co/docs/accelerate/usage_guides/checkpoint",
    "transformers": "https://huggingface.co/docs/transformers/main_classes/trainer",
    "ignite": "https://docs.pytorch.org/ignite/generated/ignite.handlers.checkpoint.Checkpoint.html",
    "Keras": "https://keras.io/api/callbacks/backup_and_restore/",
}


def source_of(trainer: str, claim: str) -> str:
    """Return the thread of a failure, or else the page that the program follows."""
    return THREADS.get((trainer, claim), _PROGRAMS.get((trainer, claim), PAGES.get(trainer, "")))


def is_thread(trainer: str, claim: str) -> bool:
    """Return whether the failure has a public thread."""
    return (trainer, claim) in THREADS
