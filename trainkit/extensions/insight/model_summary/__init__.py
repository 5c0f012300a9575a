"""A table of a model: its layers, their parameters, output shapes and FLOPs."""
