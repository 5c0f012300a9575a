"""Progress of a run on a terminal, in a notebook and in a log file."""
