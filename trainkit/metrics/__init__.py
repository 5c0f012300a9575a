"""What a Task logs, combined over batches and ranks."""
