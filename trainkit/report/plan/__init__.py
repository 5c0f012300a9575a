"""`trainkit plan`: what a run would do, worked out before it starts."""
