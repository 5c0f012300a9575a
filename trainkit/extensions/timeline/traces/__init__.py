"""Recordings of steps: what each rank writes of itself, how their clocks are aligned, and the one
file that all become.

Imports no torch: a recording is also read on machines that do not train.
"""
