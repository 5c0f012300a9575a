"""Checkpoints: the format (format.py), and saving and restoring of a run (manager.py)."""
