"""Keyword arguments of ``LLM()`` of a wrong type are refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tgi_cli import LLM
from tgi_cli.llm.settings import check_settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculate": "auto"}, "`int | null`, got `str` - at `$.speculate`"),
        ({"max_total_tokens": "4096"}, "at `$.max_total_tokens`"),
        ({"quantize_head": 1}, "at `$.quantize_head`"),
        ({"kv_cache_dir": 5}, "at `$.kv_cache_dir`"),
        ({"num_shards": 2}, "unexpected argument 'num_shards'"),
    ],
)
def test_a_wrong_argument_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        LLM("/nowhere", **settings)
    assert message in str(caught.value)


def test_a_folder_may_be_a_text() -> None:
    assert check_settings({"kv_cache_dir": "/cache"}) == {"kv_cache_dir": Path("/cache")}  # type: ignore[typeddict-item]
    assert check_settings({"max_loras": None, "waiting_served_ratio": 2}) == {
        "max_loras": None,
        "waiting_served_ratio": 2.0,
    }
