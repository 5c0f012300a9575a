"""Names a rank that hangs, and ends the job."""
