"""Cores by socket, from files as the kernel writes them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tgi_cli.process import cores
from tgi_cli.process.cores import Core, pin, usable_cores


def test_cores_are_ordered_by_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine that numbers its sockets in turns."""
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
        (folder / "physical_package_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    monkeypatch.setattr(cores, "_affinity", lambda: {0, 1, 2, 3, 4, 5, 6})
    whole = [Core(0, (0, 4)), Core(0, (2, 6)), Core(1, (1, 5)), Core(1, (3,))]
    assert usable_cores() == whole
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("250000 100000\n")
    assert usable_cores() == whole[:3]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_pinned_threads_pass_it_on() -> None:
    before = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def work() -> None:
        pin((min(before),))
        inner = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [{min(before)}]
    assert os.sched_getaffinity(0) == before
    pin(())
    assert os.sched_getaffinity(0) == before
