"""How long to wait before another try."""

from __future__ import annotations

import email.utils
import time

import pytest

from tgi_cli.hub import client


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), ("", None), ("soon", None), ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0)],
)
def test_retry_after_is_parsed(value: str, seconds: float | None) -> None:
    assert client.retry_after({"retry-after": value}) == seconds


def test_retry_after_may_be_a_date() -> None:
    moment = email.utils.formatdate(time.time() + 3600, usegmt=True)
    asked = client.retry_after({"retry-after": moment})
    assert asked is not None
    assert 3500 < asked <= 3600


def test_retry_delays_double_unless_the_server_requests_another() -> None:
    for attempt, seconds in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)):
        assert seconds * 0.8 <= client.retry_delay(attempt, None) <= seconds * 1.2
    assert client.retry_delay(4, 30.0) == 30.0
    assert client.retry_delay(4, 0.0) == 0.0
