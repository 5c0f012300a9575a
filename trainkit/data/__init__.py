"""Data: the arithmetic of a step (plan), the order of samples (order), loaders (loader), the loop's input (feed)."""
