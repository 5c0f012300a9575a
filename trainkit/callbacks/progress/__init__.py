"""What a terminal, a notebook and a log file show of a run as it goes on."""
