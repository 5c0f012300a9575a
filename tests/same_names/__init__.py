"""The same name means the same: Lightning and trainkit run the same code in one process."""
