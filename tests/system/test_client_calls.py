"""The clients people use, each of its calls, on a real server: see the scripts in ``clients``.

Releases that the test environment does not have get an environment of their own. Name a folder in
``TGI_TEST_CLIENTS`` and it is kept there for the next run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.system.clients.environment import INSTALL_SECONDS, make_environment, run_script
from tests.system.conftest import StartServer
from tests.tools.server_process import ServerProcess
from tests.tools.vision_model import make_vision_model

pytestmark = pytest.mark.system

OWN = ["anthropic", "huggingface_hub", "openai"]
OTHERS = [*OWN, "instructor", "langchain", "litellm", "text_generation"]


@pytest.fixture(scope="module")
def others(environments: Path) -> Path:
    """The Python that has the other releases."""
    return make_environment(environments)


def assert_all_pass(results: dict[str, str | None]) -> None:
    failures = [f"{call}:\n{failure}" for call, failure in results.items() if failure]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("client", OWN)
def test_the_newest(client: str, server: ServerProcess) -> None:
    assert_all_pass(run_script(Path(sys.executable), client, server.url))


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_SECONDS + 300)
@pytest.mark.parametrize("client", OTHERS)
def test_others(client: str, others: Path, server: ServerProcess) -> None:
    assert_all_pass(run_script(others, client, server.url))


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_SECONDS + 300)
def test_others_with_images(others: Path, start_server: StartServer, tmp_path: Path) -> None:
    limits = ("--max-total-tokens", "512", "--max-input-tokens", "480", "--dtype", "float32")
    server = start_server("--model-id", str(make_vision_model(tmp_path)), *limits)
    server.wait_ready()
    assert_all_pass(run_script(others, "images", server.url))
