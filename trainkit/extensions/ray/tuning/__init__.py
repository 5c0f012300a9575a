"""Searches over settings with Ray Tune:
trials for a Tuner of one's own, and the command `python -m trainkit tune`.
"""
