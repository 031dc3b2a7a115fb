"""Processes that may be killed: limits on their work, and causes of their end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tgi_cli.process.worker_pool import LimitError, Limits, WorkerError, WorkerPool, WorkersBusy

MODULE = "tests.unit.process.pool_worker"
MakePool = Callable[..., WorkerPool]


@pytest.fixture
def make() -> Iterator[MakePool]:
    pools: list[WorkerPool] = []

    def make(**limits: Any) -> WorkerPool:
        limits = {"processes": 1, "seconds": 30.0, "megabytes": 64, **limits}
        pools.append(WorkerPool(MODULE, "setup", Limits(**limits), what="tested"))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def job(**asked: Any) -> bytes:
    return json.dumps(asked).encode()


def until(found: Callable[[], bool]) -> None:
    latest = time.monotonic() + 60
    while not found():
        assert time.monotonic() < latest
        time.sleep(0.005)


def test_processes_start_on_demand_and_are_reused(make: MakePool) -> None:
    pool = make()
    assert pool.process_ids == []
    first = pool.run(job(echo="ü \ud800"))
    assert first["echo"] == "ü \ud800"
    assert first["setup"] == "setup"
    assert pool.run(job())["pid"] == first["pid"]


async def test_small_and_large_jobs_without_blocking(make: MakePool) -> None:
    pool = make()
    for text in ("x", "y" * 1_000_000):
        for _ in range(2):
            assert (await pool.run_async(job(echo=text)))["echo"] == text
    assert len(pool.process_ids) == 1


def test_a_job_that_exceeds_its_time_is_killed(make: MakePool) -> None:
    pool = make(seconds=1.0)
    pid = pool.run(job())["pid"]
    with pytest.raises(LimitError, match=r"^more than 1 s$"):
        pool.run(job(sleep=60))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert pool.run(job())["pid"] != pid


async def test_a_job_that_exceeds_its_time_is_killed_without_blocking(make: MakePool) -> None:
    pool = make(seconds=1.0)
    pid = (await pool.run_async(job()))["pid"]
    asked = asyncio.ensure_future(pool.run_async(job(sleep=60)))
    ticks = 0
    while not asked.done():
        await asyncio.sleep(0.01)
        ticks += 1
    with pytest.raises(LimitError, match=r"^more than 1 s$"):
        await asked
    assert ticks > 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="limited by means of /proc")
@pytest.mark.parametrize(
    "asked", [{"take": 100}, {"loop": 1}, {"signal": signal.SIGABRT}, {"signal": signal.SIGSEGV}]
)
async def test_a_job_that_exceeds_its_memory_fails(make: MakePool, asked: Any) -> None:
    """From a MemoryError, an abort of a library, or a stack that cannot grow."""
    pool = make()
    with pytest.raises(LimitError, match=r"^more than 64 MB of memory$"):
        pool.run(job(**asked))
    assert pool.run(job())["echo"] is None
    with pytest.raises(LimitError, match=r"^more than 64 MB of memory$"):
        await pool.run_async(job(**asked))


@pytest.mark.skipif(sys.platform != "linux", reason="limited by means of /proc")
def test_a_large_job_may_take_more(make: MakePool) -> None:
    pool = make(bytes_per_byte=1000)
    with pytest.raises(LimitError):
        pool.run(job(take=100))
    assert pool.run(job(take=100, echo="x" * 200_000))["pid"]
    with pytest.raises(LimitError):
        pool.run(job(take=100))


@pytest.mark.skipif(sys.platform != "linux", reason="limited by means of /proc")
def test_a_process_that_holds_memory_is_replaced(make: MakePool) -> None:
    pool = make()
    pid = pool.run(job(hold=40))["pid"]
    assert pool.run(job())["pid"] != pid
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("asked", [{"signal": signal.SIGKILL}, {"signal": signal.SIGTERM}])
async def test_a_job_is_retried_once_when_its_process_is_killed(make: MakePool, asked: Any) -> None:
    pool = make()
    with pytest.raises(WorkerError, match="tested processes are being killed: by signal"):
        pool.run(job(**asked))
    pid = pool.run(job())["pid"]
    with pytest.raises(WorkerError, match="being killed"):
        await pool.run_async(job(**asked))
    next_pid = pool.run(job())["pid"]
    assert next_pid != pid


@pytest.mark.parametrize("way", ["run", "run_async"])
async def test_a_killed_process_does_not_fail_its_job(make: MakePool, way: str) -> None:
    pool = make()
    pid = pool.run(job())["pid"]
    os.kill(pid, signal.SIGSTOP)
    body = job(echo="again")
    asked: asyncio.Future[Any]
    if way == "run":
        asked = asyncio.ensure_future(asyncio.to_thread(pool.run, body))
    else:
        asked = asyncio.ensure_future(pool.run_async(body))
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.005)
            if not pool.num_idle:
                break
    os.kill(pid, signal.SIGKILL)
    answer = await asked
    assert answer["echo"] == "again"
    assert answer["pid"] != pid


def test_a_process_that_died_while_idle_is_replaced(make: MakePool) -> None:
    pool = make()
    pid = pool.run(job())["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pool.run(job())["pid"] != pid


def test_a_defect_is_an_answer_and_ends_the_process(
    make: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make()
    pid = pool.run(job())["pid"]
    assert pool.run(job(**{"raise": "x"}))["error"].startswith("the server failed")
    assert "SystemExit: x" in caplog.text
    assert pool.run(job())["pid"] != pid


async def test_concurrent_jobs_are_limited_to_the_processes(make: MakePool, tmp_path: Path) -> None:
    pool = make(processes=2, wait_seconds=0.3)
    await pool.run_async(job())
    gate = tmp_path / "gate"
    slow = [asyncio.ensure_future(pool.run_async(job(until=str(gate)))) for _ in range(2)]
    await asyncio.sleep(0.1)
    until(lambda: len(pool.process_ids) == 2)
    late = await asyncio.gather(*(pool.run_async(job()) for _ in range(4)), return_exceptions=True)
    assert [type(error) for error in late] == [WorkersBusy] * 4
    gate.touch()
    assert len({answer["pid"] for answer in await asyncio.gather(*slow)}) == 2
    assert (await pool.run_async(job()))["pid"] in pool.process_ids


async def test_large_jobs_leave_a_process_for_small_ones(make: MakePool, tmp_path: Path) -> None:
    pool = make(processes=2)
    gate = tmp_path / "gate"
    body = job(until=str(gate), echo="x" * 100_000)
    large = [asyncio.ensure_future(pool.run_async(body)) for _ in range(3)]
    await asyncio.sleep(0.2)
    assert (await pool.run_async(job()))["echo"] is None
    assert not any(task.done() for task in large)
    gate.touch()
    assert len(await asyncio.gather(*large)) == 3


@pytest.mark.parametrize("way", ["run", "run_async"])
@pytest.mark.parametrize(
    "buffers", [[1], [5, 0, 7], [100_000], [3_000_000, 1], [0], [], [1 << 20] * 9]
)
async def test_buffers_follow_an_answer(make: MakePool, way: str, buffers: list[int]) -> None:
    pool = make()
    for echo in ("x", "y" * 300_000):
        body = job(buffers=buffers, echo=echo)
        answer = pool.run(body) if way == "run" else await pool.run_async(body)
        expected = b"".join(bytes((n,)) * size for n, size in enumerate(buffers))
        assert answer.get("data", b"") == expected
        assert answer["echo"] == echo
        assert (await pool.run_async(job()))["pid"] == answer["pid"], "the next job is undisturbed"


async def test_a_job_may_come_in_parts(make: MakePool) -> None:
    pool = make()
    for parts in ([job(echo="a"), bytes(10)], [b'{"echo"', b': "a"}', bytes(1_000_000)]):
        assert (await pool.run_async(parts))["echo"] == "a"
        assert pool.run(parts)["echo"] == "a"


async def test_large_jobs_may_take_all_processes(make: MakePool, tmp_path: Path) -> None:
    pool = make(processes=2, reserved=0)
    gate = tmp_path / "gate"
    large = job(until=str(gate), echo="x" * 100_000)
    asked = [asyncio.ensure_future(pool.run_async(large)) for _ in range(4)]
    async with asyncio.timeout(60):
        while len(pool.process_ids) < 2:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.005)
    gate.touch()
    assert len({answer["pid"] for answer in await asyncio.gather(*asked)}) == 2


async def test_cancelled_jobs_leave_no_state(
    make: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make()
    await pool.run_async(job())
    asked = [asyncio.ensure_future(pool.run_async(job(sleep=0.2))) for _ in range(4)]
    await asyncio.sleep(0.05)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert (await pool.run_async(job()))["echo"] is None
    with monkeypatch.context() as patched:  # no job waits, so a small one takes no thread
        patched.setattr(ThreadPoolExecutor, "submit", lambda *_: pytest.fail("took a thread"))
        pid = (await pool.run_async(job()))["pid"]
    assert pool.process_ids == [pid]
    assert pool.num_idle == 1
    large = await pool.run_async(job(echo="a" * 100_000))  # no large one counts as in progress
    assert large["pid"] == pid
    os.kill(pid, signal.SIGKILL)  # no process counts as starting
    assert (await pool.run_async(job()))["pid"] != pid


def test_an_unstartable_process_is_an_error(
    make: MakePool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", str(program))
        pool = make()
        for _ in range(2):
            with pytest.raises(WorkerError, match="no tested process can be started"):
                pool.run(job())
    assert pool.run(job())["pid"]


def test_closing_ends_jobs_in_progress(make: MakePool) -> None:
    pool = make()
    pid = pool.run(job())["pid"]
    raised: list[Exception] = []

    def ask() -> None:
        try:
            pool.run(job(sleep=60))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: not pool.num_idle)
    pool.close()
    thread.join(60)
    assert isinstance(raised[0], WorkerError)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(WorkerError, match="being ended"):
        pool.run(job())


def test_processes_end_with_the_pool() -> None:
    pool = WorkerPool(MODULE, None, Limits(processes=1), what="tested")
    pid = pool.run(job())["pid"]
    del pool
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


ORPHANS = """
import json, os, signal, sys, threading, time
from tgi_cli.process.worker_pool import Limits, WorkerPool
pool = WorkerPool("tests.unit.process.pool_worker", None, Limits(processes=2, seconds=1), what="x")
print(pool.run(b"{}")["pid"], flush=True)
threading.Thread(target=pool.run, args=(b'{"sleep": 100}',), daemon=True).start()
while pool.num_idle:
    time.sleep(0.01)
if sys.argv[1] == "idle":
    print(pool.run(b"{}")["pid"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_orphaned_processes_exit(state: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS, state], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    for pid in map(int, done.stdout.split()):
        until(lambda pid=pid: not _runs(pid))


def _runs(pid: int) -> bool:
    """Not ended, nor waiting to be reaped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] != "Z"
    return False
