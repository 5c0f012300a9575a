"""Data: the arithmetic of a step (plan), the order of samples (order), loaders (loader), what the loop pulls (feed)."""
