"""`trainkit timeline`: what a recording of steps says."""
