"""Certificate authorities, and certificates that they signed for both ends of a connection."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

_LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Identity:
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """An authority that no system trusts by default; ``certificate`` is its PEM file."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self._name = name
        self.certificate = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.certificate)

    def issue(self, name: str, *hosts: str, expired: bool = False) -> Identity:
        """Issue a certificate and a key that only its owner may read."""
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


@dataclass(frozen=True)
class CertificateFiles:
    """PEM files: a certificate, its key, both, another key, the encrypted key; the authority."""

    cert: Path
    key: Path
    both: Path
    other_key: Path
    locked: Path
    authority: Path

    @classmethod
    def make(cls, folder: Path) -> CertificateFiles:
        """Issue a certificate for 127.0.0.1 and localhost."""
        made = cls(*(folder / f"{name}.pem" for name in cls.__dataclass_fields__))
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        (chain,) = issued.cert_chain_pems
        chain.write_to_path(made.cert)
        issued.private_key_pem.write_to_path(made.key)
        issued.private_key_and_cert_chain_pem.write_to_path(made.both)
        authority.issue_cert("localhost").private_key_pem.write_to_path(made.other_key)
        key = serialization.load_pem_private_key(made.key.read_bytes(), None)
        made.locked.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"password"),
            )
        )
        authority.cert_pem.write_to_path(made.authority)
        return made
