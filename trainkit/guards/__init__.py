"""What watches a step when asked to: memory (memory.py) and losses that are not finite (finite.py)."""
