"""From a command line to live objects: compose, check, instantiate.
The only home of Hydra and OmegaConf.
"""
