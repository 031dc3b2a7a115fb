"""``import tgi_cli`` costs nothing, and says what it has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tgi_cli

PROGRAM = """
import sys
import tgi_cli
before = set(sys.modules)
heavy = {"torch", "transformers", "tokenizers", "jinja2", "httpx", "numpy", "grpc"}
assert not heavy & before, heavy & before
assert {name for name in before if name.startswith("tgi_cli.")} == {"tgi_cli.version"}
from tgi_cli import LLM, SamplingParams
assert "torch" not in sys.modules and "transformers" not in sys.modules
assert LLM.__module__ == "tgi_cli.llm.llm"
"""


def test_importing_it_is_cheap_and_the_api_brings_no_torch() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


LEFT_OPEN = """
from tgi_cli import LLM
llm = LLM(max_batch_prefill_tokens=64, max_batch_total_tokens=2048)
stream = llm.stream("Hello", max_new_tokens=1000, ignore_eos=True)
print(len(next(stream).token_ids))
"""


def test_a_program_ends_without_closing_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, check=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_every_public_name_is_there() -> None:
    for name in tgi_cli.__all__:
        assert getattr(tgi_cli, name) is not None
        assert name in dir(tgi_cli)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = tgi_cli.LLMs


def test_the_documentation_names_every_option_and_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
    named = set(re.findall(r"`(\w+)", page))
    assert set(tgi_cli.GenerationOptions.__dataclass_fields__) <= named
    assert set(tgi_cli.Completion.__dataclass_fields__) <= named
