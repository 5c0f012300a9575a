"""Launching: what has to be there before several ranks can train together."""
