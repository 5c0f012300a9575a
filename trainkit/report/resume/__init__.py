"""`trainkit check-resume`: whether a run that resumes equals the one that never stopped."""
