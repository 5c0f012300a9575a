"""Checkpoints: the format (format.py), and what of a run goes in and comes back (contents.py)."""
