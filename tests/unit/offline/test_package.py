"""``import tgi_cli`` costs nothing, and says what it has."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tgi_cli

PROGRAM = """
import sys
import tgi_cli
before = set(sys.modules)
heavy = {"torch", "transformers", "tokenizers", "jinja2", "httpx", "numpy", "grpc"}
assert not heavy & before, heavy & before
assert not any(name.startswith("tgi_cli.") for name in before)
from tgi_cli import LLM, SamplingParams
assert "torch" not in sys.modules and "transformers" not in sys.modules
assert LLM.__module__ == "tgi_cli.offline.llm"
"""


def test_importing_it_is_cheap_and_the_api_brings_no_torch() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    for name in tgi_cli.__all__:
        assert getattr(tgi_cli, name) is not None
        assert name in dir(tgi_cli)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = tgi_cli.LLMs
