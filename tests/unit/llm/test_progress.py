"""The bar: on a terminal only, unless it is asked for."""

from __future__ import annotations

import pytest

from tgi_cli import LLM


def test_silent_without_a_terminal(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], max_new_tokens=2)
    assert capfd.readouterr() == ("", "")


def test_progress_shows_requests_and_rates_on_request(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["a", "b"], n=2, max_new_tokens=2, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "4/4" in err
    assert "tokens/s in" in err
