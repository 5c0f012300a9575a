"""A rank's device: precision, transfers, and torch's process-wide switches."""
