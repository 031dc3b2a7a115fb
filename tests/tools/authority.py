"""Authorities that sign certificates for both ends of a connection, and what they have signed."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme

_LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Identity:
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """One that nobody knows by itself; ``certificate`` is its PEM file."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self._name = name
        self.certificate = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.certificate)

    def issue(self, name: str, *hosts: str, expired: bool = False) -> Identity:
        """A certificate and its key, which only the owner may read."""
        issued = self._ca.issue_cert(
            *(hosts or [name]),
            not_before=_LONG_AGO if expired else None,
            not_after=_LONG_AGO + datetime.timedelta(days=1) if expired else None,
        )
        made = Identity(*(self._folder / f"{self._name}-{name}.{end}" for end in ("pem", "key")))
        for position, pem in enumerate(issued.cert_chain_pems):
            pem.write_to_path(made.certificate, append=position > 0)
        issued.private_key_pem.write_to_path(made.key)
        made.key.chmod(0o600)
        return made
