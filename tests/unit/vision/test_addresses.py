"""Which addresses a stranger's URL may reach."""

from __future__ import annotations

import pytest

from tgi_cli.vision.addresses import may_be_dialled

PUBLIC = [
    *("8.8.8.8", "1.1.1.1", "93.184.216.34", "172.15.255.255", "172.32.0.1", "192.1.0.1"),
    *("100.63.255.255", "100.128.0.1", "198.17.255.255", "198.20.0.1", "223.255.255.255"),
    *("2606:4700:4700::1111", "2a00:1450:4001:80b::200e", "2400:cb00::1", "2620:0:ccc::2"),
    "2001:4860:4860::8888",
]
PRIVATE = [
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "10.255.255.255", "172.16.0.1"),
    *("172.31.255.255", "192.168.0.1", "192.168.255.255", "100.64.0.1", "100.127.255.255"),
    *("::1", "fc00::1", "fd12:3456:789a::1"),
]
NEVER = [
    # metadata services of clouds
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
    *("fd00:ec2::254", "fe80::a9fe:a9fe", "fe80::1%eth0"),
    # none, all, some
    *("0.0.0.0", "0.1.2.3", "::", "255.255.255.255", "224.0.0.1", "239.255.255.250", "ff02::1"),
    *("ff0e::1", "240.0.0.1"),
    # protocols, benchmarks, documentation
    *("192.0.0.8", "192.0.0.10", "192.88.99.1", "198.18.0.1", "198.19.255.255"),
    *("192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1", "100::1"),
    # IPv4 addresses within IPv6 ones: mapped, compatible, translated, 6to4, Teredo, ISATAP
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:8.8.8.8", "::127.0.0.1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b::808:808", "64:ff9b:1::7f00:1", "2002:7f00:1::1"),
    *("2002:808:808::1", "2001:0:7f00:1::1", "2a00:1450::5efe:7f00:1", "2a00::200:5efe:a00:1"),
    # site-local, and beyond 2000::/3
    *("fec0::1", "4000::1", "5f00::1", "1fff::1"),
    # no addresses
    *("", "localhost", "127.1", "2130706433", "0x7f000001", "1.2.3.4.5", "[::1]"),
]


@pytest.mark.parametrize("address", PUBLIC)
@pytest.mark.parametrize("private", [False, True])
def test_public_addresses_may_be_dialled(address: str, private: bool) -> None:
    assert may_be_dialled(address, private)


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_need_the_switch(address: str) -> None:
    assert not may_be_dialled(address)
    assert may_be_dialled(address, private=True)


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("private", [False, True])
def test_other_addresses_are_never_dialled(address: str, private: bool) -> None:
    assert not may_be_dialled(address, private)


def test_public_isatap_addresses_may_be_dialled() -> None:
    assert may_be_dialled("2a00:1450::5efe:808:808")
