"""What users write against: Task, DataModule, Callback, the counters of a run, and the order in which hooks are called."""
