"""Files that other programs run: what is asked for (request.py), the task of a run (from_run.py), formats, and the check."""
