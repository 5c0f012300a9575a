"""A trained Task as one file: weights and forward, checked against the Task's own outputs."""
