"""Checks of the TLS files between router and model server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.certificate_authority import Authority, CertificateFiles
from tgi_cli.errors import ConfigError
from tgi_cli.rpc.tls import TlsFiles, tls_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


BOTH_ENDS = pytest.mark.parametrize("server", [True, False], ids=["server", "client"])


@BOTH_ENDS
def test_valid_tls_files_are_accepted(authority: Authority, folder: Path, server: bool) -> None:
    issued = authority.issue("good", "localhost")
    TlsFiles(issued.certificate, issued.key, authority.certificate).check(server)
    together = folder / "together.pem"
    together.write_bytes(issued.key.read_bytes() + issued.certificate.read_bytes())
    together.chmod(0o600)
    TlsFiles(together, None, authority.certificate).check(server)


def test_there_is_no_tls_without_files() -> None:
    assert tls_files() is None
    assert tls_files(server_name="x") == TlsFiles(server_name="x")
    TlsFiles().check(server=False)


@BOTH_ENDS
def test_an_expired_certificate_is_refused_at_the_start(authority: Authority, server: bool) -> None:
    old = authority.issue("old", "localhost", expired=True)
    with pytest.raises(ConfigError, match=r"old\.pem: certificate has expired"):
        TlsFiles(old.certificate, old.key).check(server)


@pytest.mark.parametrize(("mode", "fine"), [(0o600, True), (0o640, True), (0o644, False)])
@pytest.mark.parametrize("apart", [True, False], ids=["key", "key with certificate"])
def test_a_key_that_others_may_read_is_refused(
    authority: Authority, folder: Path, mode: int, fine: bool, apart: bool
) -> None:
    issued = authority.issue("private", "localhost")
    files = TlsFiles(issued.certificate, issued.key)
    key = issued.key
    if not apart:
        key = folder / "both.pem"
        key.write_bytes(issued.key.read_bytes() + issued.certificate.read_bytes())
        files = TlsFiles(key)
    key.chmod(mode)
    if fine:
        files.check(server=True)
    else:
        with pytest.raises(ConfigError, match=r"other users may read the key .* of mode 0644"):
            files.check(server=True)


def test_a_key_that_the_group_may_write_is_refused(authority: Authority) -> None:
    issued = authority.issue("shared", "localhost")
    issued.key.chmod(0o660)
    with pytest.raises(ConfigError, match="other users may write the key"):
        TlsFiles(issued.certificate, issued.key).check(server=True)


def test_invalid_tls_files_are_refused(folder: Path) -> None:
    made = CertificateFiles.make(folder)
    for path in (made.key, made.other_key, made.locked, made.both):
        path.chmod(0o600)
    text = folder / "text.pem"
    text.write_text("nothing")
    for files, expected in (
        (TlsFiles(folder / "none.pem"), r"--engine-tls-cert .*none\.pem: No such file"),
        (TlsFiles(made.cert, folder / "none.pem"), r"--engine-tls-key .*none\.pem: No such file"),
        (TlsFiles(None, made.key), "--engine-tls-key has no certificate"),
        (TlsFiles(made.cert, made.other_key), "the key is of another certificate"),
        (TlsFiles(made.cert, made.locked), r"--engine-tls-key .*(encrypted|decrypt)"),
        (TlsFiles(text, made.key), "it is not a PEM file"),
        (TlsFiles(made.cert, made.key, text), r"--engine-tls-client-ca .*text\.pem: there is no"),
        (TlsFiles(made.cert, made.key, folder / "x"), "--engine-tls-client-ca .*x: No such file"),
    ):
        with pytest.raises(ConfigError, match=expected):
            files.check(server=True)
    with pytest.raises(ConfigError, match=r"--engine-tls-ca .*there is no certificate"):
        TlsFiles(authority=text).check(server=False)
