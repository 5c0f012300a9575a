"""Keeps the last steps of a run, and writes the one that failed into a folder that `trainkit replay` takes."""
