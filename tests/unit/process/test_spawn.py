"""Commands, environments, configurations and forks of child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.process_tree import is_gone
from tgi_cli.errors import ConfigError, ExitCode, GatedModelError, HubError
from tgi_cli.process.spawn import (
    child_environment,
    module_command,
    read_config,
    run_in_fork,
    write_config,
)
from tgi_cli.router.config import RouterConfig
from tgi_cli.rpc.tls import TlsFiles

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no fork")

LAUNCHER = """
import signal, sys, time
from tgi_cli.process.spawn import run_in_fork
def leave(number, frame):
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
def work():
    import os
    print(os.getpid(), flush=True)
    for _ in range(600):  # a signal just before a call does not interrupt it
        time.sleep(0.1)
run_in_fork(work)
"""


@on_linux
def test_a_fork_returns_its_result_and_no_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> tuple[int, str]:
        import this_alone

        return os.getpid(), this_alone.__name__

    (tmp_path / "this_alone.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    pid, name = run_in_fork(work)
    assert pid != os.getpid()
    assert name not in sys.modules


@on_linux
def test_a_fork_raises_its_errors() -> None:
    def refuse() -> None:
        raise GatedModelError("not for you", "ask for it")

    def fail() -> None:
        raise KeyError("a")

    with pytest.raises(GatedModelError, match="not for you") as refused:
        run_in_fork(refuse)
    assert (refused.value.remedy, refused.value.exit_code) == (
        "ask for it",
        ExitCode.MODEL_UNAVAILABLE,
    )
    with pytest.raises(RuntimeError, match="KeyError: 'a'") as failed:
        run_in_fork(fail)
    assert "in fail" in failed.value.__notes__[0]


@on_linux
def test_a_killed_fork_is_an_error() -> None:
    with pytest.raises(HubError, match="code -9"):
        run_in_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))


@on_linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_fork_ends_with_its_parent(number: signal.Signals) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert launcher.stdout is not None
    with launcher, launcher.stdout as output:
        child = int(output.readline())
        launcher.send_signal(number)
        launcher.wait(60)
    end = time.monotonic() + 60
    while not is_gone(child):
        assert time.monotonic() < end, "the child goes on"
        time.sleep(0.01)
    if number == signal.SIGTERM:
        assert launcher.returncode == 0


def test_a_child_imports_this_package_but_no_file_of_its_working_directory(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    bare = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        module_command("tgi_cli", "--version"),
        cwd=tmp_path,
        env=child_environment(bare),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("tgi ")


def test_a_configuration_reaches_a_child_as_it_was() -> None:
    config = RouterConfig(
        model_path=Path("/m"),
        model_id="org/m\u00f6del",
        engine_url="unix:/s",
        engine_tls=TlsFiles(authority=Path("/ca.pem")),
        cors_allow_origin=("https://a.example", "http://b"),
        api_key="secret",
        watchdog_timeout=float("1e-3"),
    )
    program = (
        "import sys\n"
        "from tgi_cli.process.spawn import read_config\n"
        "from tgi_cli.router.config import RouterConfig\n"
        "config = read_config(int(sys.argv[1]), RouterConfig)\n"
        "print(config, config.api_key)\n"
    )
    fd = write_config(config)
    done = subprocess.run(
        [sys.executable, "-c", program, str(fd)],
        pass_fds=[fd],
        capture_output=True,
        text=True,
        check=True,
    )
    os.close(fd)
    assert done.stdout == f"{config} secret\n"
    assert read_config(write_config(config), RouterConfig) == config


def test_a_descriptor_without_a_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config-fd 10000"):
        read_config(10_000, RouterConfig)
    other = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(ConfigError, match="--config-fd"):
        read_config(other, RouterConfig)
