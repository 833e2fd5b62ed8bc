"""The address by which other nodes reach this machine."""

from __future__ import annotations

import os

import pytest

from pentameter.errors import ConfigError
from pentameter.machine import address
from pentameter.machine.address import api_key_of, own_address

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


def test_a_key_comes_from_the_environment_and_an_unusable_one_is_not_repeated():
    assert api_key_of(None, {}) is None
    assert api_key_of(None, {"PENTAMETER_API_KEY": ""}) is None
    assert api_key_of(None, {"PENTAMETER_API_KEY": "k-1"}) == "k-1"
    assert api_key_of("k-2", {"PENTAMETER_API_KEY": "k-1"}) == "k-2"
    for key in ("two words", "schlüssel", "line\n"):
        with pytest.raises(
            ConfigError, match="the key in PENTAMETER_API_KEY is empty, or"
        ) as error:
            api_key_of(None, {"PENTAMETER_API_KEY": key})
        assert key.strip() not in str(error.value)
