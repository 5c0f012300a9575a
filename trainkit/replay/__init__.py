"""Runs the step of a crash capsule again, in one process."""

from trainkit.callable_package import make_callable

make_callable(__name__)
