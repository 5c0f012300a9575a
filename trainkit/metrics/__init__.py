"""A Task's logged values, combined over batches and ranks."""
