"""Runs the step of a crash capsule again, in one process."""
