"""Which addresses may be dialled for a stranger's URL.

``ipaddress.is_global`` alone is not enough: it holds for multicast, for the metadata services that
clouds have at public addresses and, depending on Python's version, for ranges that carry an IPv4
address (6to4, Teredo) or belong to protocols.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""All that is routed (RFC 4291). Mapped (``::ffff:``) and translated (``64:ff9b::``) IPv4 addresses
are outside of it."""
_SPECIAL = tuple(
    ip_network(block)
    for block in (
        "192.0.0.0/24",  # IETF protocols (RFC 6890), among them metadata in Oracle's cloud
        "192.88.99.0/24",  # relays of 6to4 (RFC 7526)
        "168.63.129.16/32",  # Azure's WireServer
        "2001::/23",  # IETF protocols, among them Teredo (RFC 4380)
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4 (RFC 3056)
        "3fff::/20",  # documentation
    )
)
"""Blocks within the global ranges where no web server is."""
_PRIVATE = tuple(
    ip_network(block)
    for block in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
        *("::1/128", "fc00::/7"),
    )
)
"""This machine, private networks (RFC 1918, RFC 4193) and carriers' networks (RFC 6598)."""
_METADATA = tuple(ip_network(block) for block in ("100.100.100.200/32", "fd00:ec2::/32"))
"""Metadata services of Alibaba and AWS within private ranges; most are link-local."""
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Upper half of an interface identifier that ends in an IPv4 address (RFC 5214)."""


def may_be_dialled(address: str, private: bool = False) -> bool:
    """Whether an address, as the resolver writes it, is public.

    Args:
        private: Also allow private networks and this machine, but not their metadata services, nor
            link-local addresses.
    """
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if private and any(found in block for block in _PRIVATE):
        return not any(found in block for block in _METADATA)
    return _is_public(found)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if not address.is_global or any(address in block for block in _SPECIAL):
        return False
    if isinstance(address, IPv4Address):
        return not address.is_multicast
    if address not in _GLOBAL_UNICAST:
        return False
    if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        return _is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return True
