"""Scripts that a property starts, under launchers."""
