"""`trainkit scaling`: the time of a step at other numbers of ranks."""
