"""Engines: the machines behind the wall (base.py).
This file imports nothing, so select.py and options.py need no torch.
"""
