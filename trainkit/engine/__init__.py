"""Engines: the machines behind the wall (base.py). This file imports nothing, so that launcher.py stays free of torch."""
