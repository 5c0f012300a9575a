"""What a run will do, before it does it (plan.py), and what to think about (advice.py)."""
