"""Ray: its version here, and the cluster that RAY_ADDRESS names. Ray is not imported."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping

from trainkit.extension import Finding
from trainkit.extensions.ray.connection import fault_of_address

AREA = "Ray"
LEAST = (2, 60)  # the version that trainkit was tested with


def look(environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield the findings; none where neither Ray nor RAY_ADDRESS is.
    `environ` is os.environ by default.
    """
    environ = os.environ if environ is None else environ
    address = environ.get("RAY_ADDRESS", "")
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        if address:
            why = (
                f"RAY_ADDRESS is {address}, and this Python has no Ray: launcher=ray, tune and"
                " data=ray cannot run."
            )
            yield Finding(AREA, "Ray", "none", "warning", why, "pip install 'trainkit[ray]'")
        return
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST:
        why = f"trainkit was tested with Ray {LEAST[0]}.{LEAST[1]} and newer."
        yield Finding(AREA, "Ray", version, "warning", why, "pip install --upgrade 'trainkit[ray]'")
    else:
        yield Finding(AREA, "Ray", version)
    if not address:
        yield Finding(AREA, "cluster", "none named: launcher=ray starts one on this host")
    elif fault := fault_of_address(address):
        yield Finding(
            AREA,
            "cluster",
            address,
            "wrong",
            fault,
            "unset RAY_ADDRESS, or give a running cluster's: host:6379",
        )
    else:
        yield Finding(AREA, "cluster", address)
