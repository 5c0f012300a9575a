"""Sums of gradients while backward runs: buckets, hooks, and how the bytes travel."""
