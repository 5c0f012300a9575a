"""Data: the arithmetic of a step (plan.py), the order of samples (order.py), loaders (loader.py), what the loop pulls (feed.py)."""
