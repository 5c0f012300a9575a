"""Masks of models of transformers, of rows in which documents may stand, without waiting for the
device.

Before it builds a mask, transformers asks the device whether any row holds several documents at all,
by positions that begin again (masking_utils.find_packed_sequence_indices), since it needs no mask
if none does. A GPU ends all that is queued before it answers, and a step's forward waits for that.
Within `rows_of` it does not ask.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_here = threading.local()


def rows_of(documents: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context of this thread in which models of transformers ask no device.

    Args:
        documents: whether a row may hold several, where positions begin again; they do not see each
            other, as without this context. Else it is one text.
    """
    if torch.compiler.is_compiling():  # nothing is asked there
        return contextlib.nullcontext()
    _install()
    return _given(documents)


@contextlib.contextmanager
def _given(documents: bool) -> Iterator[None]:
    before = getattr(_here, "documents", None)
    _here.documents = documents
    try:
        yield
    finally:
        _here.documents = before


@functools.cache
def _install() -> None:
    from transformers import masking_utils  # optional, and there if its models are

    asking = getattr(masking_utils, "find_packed_sequence_indices", None)
    if asking is None:  # a version that does not ask
        return

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling() or getattr(_here, "documents", None) is None:
            numbers: Tensor | None = asking(position_ids)
            return numbers
        if not _here.documents:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
