"""The features of a fit: the one list. A new one is a file, and an entry here; or an extension
brings it.
"""

from __future__ import annotations

from trainkit import extension
from trainkit.errors import ConfigError
from trainkit.run.bad_samples import SkipBadSamples
from trainkit.run.communication import SavedCommunication
from trainkit.run.compile import Compile
from trainkit.run.elastic import ElasticFit
from trainkit.run.eval_weights import EvalWeights
from trainkit.run.feature import Feature, Features
from trainkit.run.finite import StopOnNonfinite
from trainkit.run.manual import ManualUpdates
from trainkit.run.reload import Reload
from trainkit.run.setup import Stage

# Options whose features are extensions, for a copy of trainkit without them.
_OF_EXTENSIONS = {
    "activation_checkpointing": "recompute",
    "sync_batchnorm": "sync_batchnorm",
    "halve_batch_on_oom": "halving",
}


def features_of(stage: Stage) -> Features:
    """Return the features that the options, the Task and the job ask for.

    Raises:
        ConfigError: an extension that has one is not there.
    """
    numerics = stage.options.numerics
    samples = stage.options.samples
    features = Features()
    asked: list[object] = [
        numerics.compile and Compile(numerics.compile, stage.enter_once),
        stage.elastic
        and stage.is_elastic
        and ElasticFit(stage.elastic, stage.engine.comm.outlives_ranks),
        numerics.stop_on_nonfinite and StopOnNonfinite(),
        samples.limit and SkipBadSamples(samples.limit, stage.feeds.skip),
        not stage.task.automatic_optimization and ManualUpdates(stage, features),
        samples.reload_dataloaders_every_n_epochs and Reload(stage, features),
        SavedCommunication(),
        EvalWeights(),
    ]
    features.extend(feature for feature in asked if isinstance(feature, Feature))
    features.extend(extension.features(stage))
    names = {feature.name for feature in features}
    for option, brought_by in _OF_EXTENSIONS.items():
        if getattr(numerics, option) and f"trainer.{option}" not in names:
            raise ConfigError(
                f"trainer.{option} is {getattr(numerics, option)}, and this copy of trainkit lacks"
                f" the extension '{brought_by}'. Install all of trainkit, or leave the option out."
            )
    return features
