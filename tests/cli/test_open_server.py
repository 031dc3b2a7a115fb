"""The warning that a server is open to everybody who reaches it."""

from __future__ import annotations

from typing import Any

import pytest

from tgi_cli.cli import main
from tgi_cli.errors import ExitCode


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ["--hostname 127.0.0.1", "--api-key", "--cors-allow-origin"]),
        (["--hostname", "::"], ["--hostname 127.0.0.1", "--api-key", "--cors-allow-origin"]),
        (["--cors-allow-origin", "https://a.example"], ["--hostname 127.0.0.1", "--api-key"]),
        (["--hostname", "127.0.0.1"], None),
        (["--hostname", "::1"], None),
        (["--hostname", "localhost"], None),
        (["--api-key", "secret"], None),
    ],
)
def test_an_open_server_is_warned_of_in_one_line(
    arguments: list[str],
    named: list[str] | None,
    served: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.run(["serve", *arguments]) == ExitCode.OK
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    if named is None:
        assert warnings == []
        return
    assert len(warnings) == 1
    assert "port 3000 is open without a key" in warnings[0]
    flags = ("--hostname 127.0.0.1", "--api-key", "--cors-allow-origin")
    assert [flag for flag in flags if flag in warnings[0]] == named
