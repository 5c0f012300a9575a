"""Records steps on all ranks, and makes one file of them."""
