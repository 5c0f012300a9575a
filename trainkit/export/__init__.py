"""A trained Task as one file: weights and forward, checked against the Task's own outputs."""

from trainkit.callable_package import make_callable

make_callable(__name__)
