"""A training loop that the user writes."""
