"""Certificates of an authority that nobody else knows, for servers on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


@dataclass(frozen=True)
class Files:
    """PEM files: a certificate, its key, both, another key, the key locked; the authority."""

    cert: Path
    key: Path
    both: Path
    other_key: Path
    locked: Path
    authority: Path

    @classmethod
    def make(cls, folder: Path) -> Files:
        """For 127.0.0.1 and localhost."""
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
