"""The Horovod of this environment: the tests of ranks say nothing about another one."""

from __future__ import annotations

import pytest

from trainkit.extensions.horovod_build.patches import identity, installed_edits

pytestmark = pytest.mark.parallel


def test_this_environment_has_the_edits() -> None:
    """What is tested here is a Horovod with the edits of this trainkit,
    none that was built before or by others.
    """
    assert installed_edits() == identity(), "run: python -m trainkit horovod install"
