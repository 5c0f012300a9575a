"""Searches over settings with Ray Tune: `trial` for a Tuner of your own, and the command `python -m trainkit tune`."""

from trainkit.tuning.trainable import trial as trial
