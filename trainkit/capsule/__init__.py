"""Capsules: one step of one rank in a folder, so that it can be taken again elsewhere."""
