"""The names of this host, its interfaces, and its routes to others."""

from __future__ import annotations

import socket

import pytest

from trainkit.errors import ConfigError
from trainkit.launch import network
from trainkit.launch.network import address_of, interface_to, is_local


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", socket.gethostname()])
def test_this_hosts_names_are_local(host: str) -> None:
    """All of them."""
    assert is_local(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_other_hosts_are_not(host: str) -> None:
    """TEST-NET-1, and an unknown name, are not local."""
    assert not is_local(host)


def test_an_interface_has_an_address() -> None:
    """For an unknown one, the known ones are named."""
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="'nic9'.*interfaces: .*lo"):
        address_of("nic9")


def test_a_host_is_reached_by_the_interface_that_leads_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This host itself by the loopback; a host without a route is named."""
    assert interface_to(socket.gethostname()) == "lo"
    monkeypatch.setattr(network, "is_local", lambda host: False)
    assert interface_to("127.0.0.9") == "lo"
    with pytest.raises(ConfigError, match="no route to host 'nowhere.invalid'"):
        interface_to("nowhere.invalid")
