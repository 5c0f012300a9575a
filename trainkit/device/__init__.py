"""A rank's device: precision, transfers, statistics, and torch's process-wide switches."""
