"""What trainers do not have, by their own pages, and the public thread of each known failure."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.conformance.claims import load_claims

_LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"
_ACCELERATE = "https://github.com/huggingface/accelerate"
_TRANSFORMERS = "https://github.com/huggingface/transformers"
_IGNITE = "https://github.com/pytorch/ignite"
_KERAS = "https://github.com/keras-team/keras"
_TORCH = "https://github.com/pytorch/pytorch"
_SAVING = "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html"
_DDP = "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html"
_AMP = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_IMAGENET = "https://github.com/pytorch/examples/blob/main/imagenet/main.py"
_STATEFUL = "https://docs.pytorch.org/data/main/torchdata.stateful_dataloader.html"
_HF = "https://huggingface.co/docs"
_OF_LIGHTNING = "https://lightning.ai/docs/pytorch/stable/common"
_OF_COMPOSER = "https://docs.mosaicml.com/projects/composer/en/latest"
_OF_IGNITE = "https://docs.pytorch.org/ignite"


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
_NO_CONFIG = "it reads no config file that names classes"
_NO_SIGNAL = "it does not handle signals"
ALONE = ("Keras",)  # trainers without runs on ranks
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
_SIGNALS = ("a-signal-leaves-a-checkpoint", "a-signal-to-one-rank")
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
    ("by hand", "a-config-runs-no-command"): Declared(_NO_CONFIG, _SAVING),
    ("Accelerate", "a-config-runs-no-command"): Declared(
        _NO_CONFIG, f"{_HF}/accelerate/package_reference/cli"
    ),
    ("transformers", "a-config-runs-no-command"): Declared(
        _NO_CONFIG, f"{_HF}/transformers/main_classes/trainer"
    ),
    ("ignite", "a-config-runs-no-command"): Declared(_NO_CONFIG, f"{_OF_IGNITE}/engine.html"),
    ("Keras", "a-config-runs-no-command"): Declared(
        _NO_CONFIG, "https://keras.io/api/models/model_training_apis/"
    ),
    ("Composer", "a-config-runs-no-command"): Declared(
        _NO_CONFIG, f"{_OF_COMPOSER}/trainer/using_the_trainer.html"
    ),
    **{
        ("Composer", name): Declared(
            "checkpoints are saved by interval; none is chosen by a score",
            f"{_OF_COMPOSER}/trainer/checkpointing.html",
        )
        for name in ("resume-best-score", "nan-is-never-the-best", "nan-first-is-not-the-best")
    },
    **{
        ("Composer", name): Declared(
            "it reports the loss of each batch, and no mean of an epoch: its training metrics are"
            " reset on every batch",
            f"{_OF_COMPOSER}/_modules/composer/trainer/trainer.html",
        )
        for name in (
            "training-loss-of-an-epoch",
            "training-loss-over-ranks",
            "training-loss-under-accumulation",
        )
    },
    **{
        ("Composer", name): Declared(_NO_SIGNAL, f"{_OF_COMPOSER}/notes/resumption.html")
        for name in _SIGNALS
    },
    **{("by hand", name): Declared(_NO_SIGNAL, _SAVING) for name in _SIGNALS},
    **{
        ("Accelerate", name): Declared(_NO_SIGNAL, f"{_HF}/accelerate/usage_guides/checkpoint")
        for name in _SIGNALS
    },
    **{("ignite", name): Declared(_NO_SIGNAL, f"{_OF_IGNITE}/engine.html") for name in _SIGNALS},
    ("Keras", "a-signal-leaves-a-checkpoint"): Declared(
        _NO_SIGNAL, "https://keras.io/api/callbacks/backup_and_restore/"
    ),
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

# (trainer, claim) -> where that failure is known; claims of one cause share a thread.
_MIDDLE = (
    "resume-samples",
    "resume-weights",
    "resume-twice",
    "resume-with-workers",
    "resume-a-stream",
    "resume-accumulation",
    "resume-ema-inside-an-epoch",
    "resume-two-optimizers",
    "resume-on-another-number-of-ranks",
)
_RANDOM_STATES = (
    "resume-weights",
    "resume-at-an-epochs-end",
    "resume-with-workers",
    "resume-accumulation",
    "resume-two-optimizers",
)
_PADDED = ("uneven-ranks-samples", "uneven-ranks-gradient")
THREADS: dict[tuple[str, str], str] = {
    **{("Lightning", name): f"{_LIGHTNING}/issues/17543" for name in _RANDOM_STATES},
    **{("Lightning", name): f"{_LIGHTNING}/issues/3325" for name in _PADDED},
    ("Lightning", "tokens-over-accumulation"): f"{_LIGHTNING}/issues/20350",
    ("Lightning", "short-last-window"): f"{_LIGHTNING}/issues/19987",
    ("Lightning", "metric-object-over-ranks"): f"{_LIGHTNING}/issues/2398",
    ("Lightning", "augmentation-differs-over-ranks"): f"{_LIGHTNING}/issues/16166",
    ("Lightning", "a-signal-to-one-rank"): f"{_LIGHTNING}/issues/20806",
    ("transformers", "resume-past-a-torn-checkpoint"): f"{_TRANSFORMERS}/issues/35525",
    ("transformers", "resume-after-a-kill-while-saving"): f"{_TRANSFORMERS}/issues/35782",
    ("transformers", "augmentation-differs-over-ranks"): f"{_TRANSFORMERS}/issues/31412",
    **{("Keras", name): f"{_KERAS}/pull/22490" for name in _MIDDLE},
    ("Keras", "resume-best-score"): f"{_KERAS}/issues/17012",
    ("Keras", "resume-patience"): "https://github.com/tensorflow/tensorflow/issues/50516",
    ("ignite", "evaluation-over-ranks"): f"{_TORCH}/issues/25162",
    ("ignite", "metric-object-over-ranks"): f"{_TORCH}/issues/25162",
    **{
        (who, "schedule-and-a-skipped-update"): f"{_TORCH}/issues/55585"
        for who in ("by hand", "ignite")
    },
    **{("ignite", name): f"{_TORCH}/issues/49180" for name in _PADDED},
}

# Pages of a trainer that say so.
SAYS: dict[tuple[str, str], str] = {
    ("Lightning", "evaluation-over-ranks"): (f"{_OF_LIGHTNING}/lightning_module.html#validation"),
    **{
        (who, "batch-norm-over-ranks"): (
            "https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html"
        )
        for who in ("by hand", "Lightning", "Accelerate", "ignite")
    },
    ("by hand", "resume-on-another-number-of-ranks"): _STATEFUL,
    ("Lightning", "resume-on-another-number-of-ranks"): _STATEFUL,
}

# (trainer, kind or claim) -> the page that the programs follow, which says nothing of the claim.
_USAGE: dict[tuple[str, str], str] = {
    ("by hand", "resume"): _SAVING,
    ("by hand", "means"): _AMP,
    ("by hand", "training-loss-over-ranks"): _IMAGENET,
    ("by hand", "uneven-ranks-gradient"): (
        "https://docs.pytorch.org/tutorials/advanced/generic_join.html"
    ),
    ("by hand", "tokens-over-ranks"): _DDP,
    ("by hand", "numerics"): _DDP,
    ("by hand", "augmentation-differs-over-ranks"): _IMAGENET,
    ("by hand", "faults"): "https://docs.pytorch.org/docs/stable/elastic/run.html",
    ("by hand", "security"): _SAVING,
    (
        "by hand",
        "cost",
    ): "https://docs.pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html",
    ("Lightning", "resume"): f"{_OF_LIGHTNING}/checkpointing_basic.html",
    ("Lightning", "means"): f"{_OF_LIGHTNING}/trainer.html#accumulate-grad-batches",
    ("Lightning", "numerics"): f"{_OF_LIGHTNING}/trainer.html",
    ("Lightning", "faults"): f"{_OF_LIGHTNING}/trainer.html",
    ("Lightning", "security"): f"{_OF_LIGHTNING}/checkpointing_basic.html",
    ("Lightning", "cost"): f"{_OF_LIGHTNING}/trainer.html",
    ("Accelerate", "resume"): f"{_HF}/accelerate/usage_guides/checkpoint",
    ("Accelerate", "means"): f"{_HF}/accelerate/usage_guides/gradient_accumulation",
    ("Accelerate", "training-loss-of-an-epoch"): (
        f"{_ACCELERATE}/blob/main/examples/complete_nlp_example.py"
    ),
    ("Accelerate", "training-loss-over-ranks"): (
        f"{_ACCELERATE}/blob/main/examples/complete_nlp_example.py"
    ),
    ("Accelerate", "numerics"): f"{_HF}/accelerate/concept_guides/performance",
    ("Accelerate", "faults"): f"{_HF}/accelerate/package_reference/kwargs",
    ("Accelerate", "security"): f"{_HF}/accelerate/usage_guides/checkpoint",
    ("Accelerate", "cost"): f"{_HF}/accelerate/quicktour",
    **{
        ("transformers", kind): f"{_HF}/transformers/main_classes/trainer"
        for kind in ("resume", "means", "numerics", "faults", "security", "cost")
    },
    ("ignite", "resume"): f"{_OF_IGNITE}/engine.html#resuming-the-training",
    ("ignite", "means"): f"{_OF_IGNITE}/generated/ignite.engine.supervised_training_step.html",
    ("ignite", "numerics"): f"{_OF_IGNITE}/distributed.html",
    ("ignite", "nan-first-is-not-the-best"): (
        f"{_OF_IGNITE}/generated/ignite.handlers.checkpoint.Checkpoint.html"
    ),
    ("ignite", "nan-is-no-improvement"): (
        f"{_OF_IGNITE}/generated/ignite.handlers.early_stopping.EarlyStopping.html"
    ),
    ("ignite", "faults"): f"{_OF_IGNITE}/distributed.html",
    ("ignite", "security"): f"{_OF_IGNITE}/generated/ignite.handlers.checkpoint.Checkpoint.html",
    ("ignite", "cost"): f"{_OF_IGNITE}/engine.html",
    ("Keras", "resume"): "https://keras.io/api/callbacks/backup_and_restore/",
    ("Keras", "means"): "https://keras.io/api/optimizers/",
    ("Keras", "numerics"): "https://keras.io/api/callbacks/model_checkpoint/",
    ("Keras", "faults"): "https://keras.io/api/callbacks/backup_and_restore/",
    ("Keras", "security"): "https://keras.io/guides/serialization_and_saving/",
    ("Keras", "cost"): "https://keras.io/api/models/model_training_apis/",
    ("Composer", "resume"): f"{_OF_COMPOSER}/notes/resumption.html",
    ("Composer", "means"): f"{_OF_COMPOSER}/trainer/using_the_trainer.html",
    ("Composer", "numerics"): f"{_OF_COMPOSER}/trainer/using_the_trainer.html",
    ("Composer", "faults"): f"{_OF_COMPOSER}/trainer/using_the_trainer.html",
    ("Composer", "security"): f"{_OF_COMPOSER}/trainer/checkpointing.html",
    ("Composer", "cost"): f"{_OF_COMPOSER}/trainer/using_the_trainer.html",
}


def source_of(trainer: str, claim: str) -> str:
    """Return the link of a failure."""
    kind = load_claims()[claim].kind
    usage = _USAGE.get((trainer, claim), _USAGE.get((trainer, kind), ""))
    return THREADS.get((trainer, claim), SAYS.get((trainer, claim), usage))


def kind_of(trainer: str, claim: str) -> str:
    """Return what that link is."""
    if (trainer, claim) in THREADS:
        return "thread"
    return "page" if (trainer, claim) in SAYS else "documented usage"
