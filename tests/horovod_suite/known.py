"""Horovod's own tests that fail for a reason outside trainkit, by module, class and name."""

from __future__ import annotations

_MUON = (
    "it builds every optimizer of torch.optim on a bias, and Muon, newer than Horovod, takes 2-D"
    " parameters only"
)
KNOWN = {
    "test_torch.TorchTests.test_broadcast_state": _MUON,
    "test_torch.TorchTests.test_broadcast_state_options": _MUON,
    "test_torch.TorchTests.test_force_allreduce": _MUON,
    "test_elastic_torch.ElasticTorchTests.test_resurrecting_blacklisted_hosts_exponential_backoff": (
        "it expects a host whose worker failed to be away for two epochs, which last longer here"
        " than its cooldown of 1 to 2 s"
    ),
}
