"""Settings found by measuring the job itself (`python -m trainkit find`): each finder trains copies, and leaves no trace."""
