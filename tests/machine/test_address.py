"""The address by which other nodes reach this machine."""

from __future__ import annotations

import os

import pytest

from pentameter.errors import ConfigError
from pentameter.machine import address
from pentameter.machine.address import own_address

LOOPBACK = "127.0.0.1"


@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="asks Linux for interfaces")
def test_the_interface_that_gloo_is_told_is_the_address():
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) == (LOOPBACK, "lo")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=none0 is no network interface"):
        own_address({"GLOO_SOCKET_IFNAME": "none0"})
    assert own_address({"NCCL_SOCKET_IFNAME": "=lo"}) == (LOOPBACK, "lo")


@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="asks Linux for interfaces")
@pytest.mark.parametrize("pattern", ["^docker0,lo", "none", "eth,ib"])
def test_a_pattern_for_nccl_is_no_interface(pattern, monkeypatch):
    monkeypatch.setattr(address, "_interfaces", lambda: {"lo": LOOPBACK, "eth7": "10.0.0.7"})
    assert own_address({"NCCL_SOCKET_IFNAME": pattern}) == ("10.0.0.7", "eth7")
