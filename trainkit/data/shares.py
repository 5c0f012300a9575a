"""The arithmetic of unequal ranks:
how many samples of a round each rank takes (plan.py splits them). Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

Shares = tuple[int, ...]


def format_shares(shares: Sequence[int] | None) -> str:
    """Return shares as the contract holds them: "3:1", or "even"."""
    return ":".join(map(str, shares)) if shares is not None and len(set(shares)) > 1 else "even"


def parse_shares(text: str) -> Shares | None:
    """Return the shares that `format_shares` has written, None for even ones."""
    return None if text == "even" else tuple(map(int, text.split(":")))


def samples_of(shares: Sequence[int] | None, total: int, ranks: int) -> Shares:
    """Return the samples of each rank in a round of `total`, as plan.py splits them."""
    shares = shares or [1] * ranks
    bounds = [total * sum(shares[:rank]) // sum(shares) for rank in range(ranks + 1)]
    return tuple(after - before for before, after in zip(bounds, bounds[1:], strict=False))
