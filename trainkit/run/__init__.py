"""The parts of a run, from the first check of its settings to its last checkpoint."""
