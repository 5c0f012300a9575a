"""Pages of what `python -m trainkit find` has found."""
