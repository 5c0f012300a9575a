"""Ranks that send less: settings, what they exclude, and steps of ranks alone.
Low-rank sums are in reduce/low_rank.py.
"""
