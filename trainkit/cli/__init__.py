"""The commands of `python -m trainkit`, one file each."""
