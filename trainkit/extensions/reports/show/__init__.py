"""The page of one run or several, from the files that they left: metrics, config, checkpoints."""
