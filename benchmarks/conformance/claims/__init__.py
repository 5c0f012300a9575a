"""The claims, by kind."""

from __future__ import annotations

import importlib

from benchmarks.conformance.claims.table import CLAIMS, KINDS, Claim


def load_claims() -> dict[str, Claim]:
    """Return all claims by name, in the order of their kinds."""
    for kind in KINDS:
        importlib.import_module(f"benchmarks.conformance.claims.{kind}")
    return CLAIMS
