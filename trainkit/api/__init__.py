"""The users' interface: Task, DataModule, Callback, the counters of a run,
and the order of hooks.
"""
