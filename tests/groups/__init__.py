"""The groups of the tests: which there are, which are due, how they run beside each other, and how
long they took.

table       groups.toml -> Group; which group a test belongs to
plugin      pytest --group NAME; seconds and started processes of each test
runner      runs groups side by side, each with its output in build/tests/NAME.log
stamps      tests/stamps.json: the last complete green run of each group; what changed since
report      the end of a run: slowest tests, budgets; CONTRIBUTING's table
__main__    python -m tests.groups quick|all|due|check|table|NAME ...
"""
