"""Processes that compile: what they cost, and what happens to those that cost too much."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.text import tiny
from tgi_cli.errors import RouterError
from tgi_cli.process.worker_pool import Limits, WorkerError, WorkersBusy
from tgi_cli.text.grammar import checker
from tgi_cli.text.grammar.checker import GrammarChecker
from tgi_cli.text.grammar.grammar import Grammar, GrammarError
from tgi_cli.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny.byte_level())


def json_grammar(schema: Any) -> Grammar:
    return Grammar.of({"json": schema}, "grammar")


def bomb(patterns: int, name: str = "a") -> Grammar:
    """Few bytes that take time and memory without end: 12 take a second, 16 a gigabyte."""
    schema = {"type": "string", "allOf": [{"pattern": f".*{name}{i}.*"} for i in range(patterns)]}
    return json_grammar(schema)


def make_checker(**limits: Any) -> GrammarChecker:
    return GrammarChecker(TOKENIZER, [1], Limits(**limits))


@pytest.fixture
async def ordinary() -> AsyncIterator[GrammarChecker]:
    found = make_checker(processes=1, seconds=30)
    yield found
    found.close()


def processes(of: GrammarChecker) -> list[int]:
    return of.pool.process_ids


async def started(of: GrammarChecker) -> int:
    """The first process, as soon as there is one."""
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.01)
            with contextlib.suppress(IndexError):
                return processes(of)[0]


async def taken(of: GrammarChecker) -> None:
    """Wait until no process is idle."""
    async with asyncio.timeout(60):
        while True:
            await asyncio.sleep(0.01)
            if not of.pool.num_idle:
                return


async def test_the_same_grammar_is_compiled_once(ordinary: GrammarChecker) -> None:
    assert not ordinary.pool.process_ids, "nothing is started before it is needed"
    first = json_grammar({"type": "object"})
    again = json_grammar({"type": "object"})
    found = await asyncio.gather(*(ordinary.compile(g) for g in (first, again, first)))
    assert len(set(found)) == 1
    assert '"type": "object"' in found[0]
    (pid,) = processes(ordinary)
    os.kill(pid, signal.SIGSTOP)  # it would not answer
    assert await ordinary.compile(again) == found[0]
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(GrammarError, match="`not` is not supported"):
        await ordinary.compile(json_grammar({"not": {}}))
    assert processes(ordinary) == [pid]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(GrammarError, match="`not` is not supported"):
        await ordinary.compile(json_grammar({"not": {}}))
    os.kill(pid, signal.SIGCONT)


async def test_the_models_special_tokens_are_known(ordinary: GrammarChecker) -> None:
    found = await ordinary.compile(Grammar.of({"lark": 'start: <|im_start|> "x"'}, "g"))
    assert "<|im_start|>" in found
    with pytest.raises(GrammarError, match="unknown special token"):
        await ordinary.compile(Grammar.of({"lark": 'start: <|other|> "x"'}, "g"))


async def test_slow_compilation_is_killed() -> None:
    found = make_checker(seconds=0.5, megabytes=100_000)
    try:
        slow = asyncio.ensure_future(found.compile(bomb(20)))
        pid = await started(found)
        with pytest.raises(GrammarError, match=r"it takes more than 0.5 s to compile"):
            await slow
        assert not found.pool.process_ids
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(GrammarError, match=r"it takes more than 0.5 s to compile"):
            await found.compile(bomb(20))
        assert not found.pool.process_ids, "it is not tried again at once"
    finally:
        found.close()


async def test_others_go_on_meanwhile() -> None:
    found = make_checker(processes=2, seconds=60, megabytes=100_000)
    try:
        await found.compile(json_grammar({}))
        slow = asyncio.ensure_future(found.compile(bomb(20)))
        await taken(found)
        for number in range(5):
            await found.compile(json_grammar({"const": number}))
        assert not slow.done()
        slow.cancel()
    finally:
        found.close()


async def test_compilation_beyond_its_memory_limit_ends() -> None:
    found = make_checker(processes=1, seconds=60, megabytes=64)
    try:
        with pytest.raises(GrammarError, match="it takes more than 64 MB of memory to compile"):
            await found.compile(bomb(30))
        assert not found.pool.process_ids
        assert "const" in await found.compile(json_grammar({"const": 1}))
    finally:
        found.close()


async def test_dead_process_is_replaced(ordinary: GrammarChecker) -> None:
    await ordinary.compile(json_grammar({"const": 1}))
    (pid,) = processes(ordinary)
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    await ordinary.compile(json_grammar({"const": 2}))
    assert processes(ordinary) != [pid]


async def test_killed_process_is_not_a_grammar_error(ordinary: GrammarChecker) -> None:
    """It is compiled in another process; when that is killed too, nothing is remembered of it."""
    await ordinary.compile(json_grammar({}))
    for kills in (1, 2):
        (pid,) = processes(ordinary)
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(ordinary.compile(json_grammar({"const": kills})))
        await taken(ordinary)
        os.kill(pid, signal.SIGKILL)
        if kills == 2:
            async with asyncio.timeout(60):
                while True:
                    await asyncio.sleep(0.001)
                    if processes(ordinary) not in ([], [pid]):
                        break
            os.kill(processes(ordinary)[0], signal.SIGKILL)
            with pytest.raises(WorkerError, match=r"being killed: by signal 9|can be started"):
                await asked
        else:
            assert "const" in await asked
    assert '"const": 2' in await ordinary.compile(json_grammar({"const": 2}))


async def test_waiting_too_long_raises_workers_busy() -> None:
    found = make_checker(processes=1, seconds=2, megabytes=100_000, wait_seconds=0.2)
    try:
        asked = [bomb(20), *(json_grammar({"const": number}) for number in range(3))]
        told = await asyncio.gather(*map(found.compile, asked), return_exceptions=True)
        assert isinstance(told[0], GrammarError)
        assert [type(error) for error in told[1:]] == [WorkersBusy] * 3
        assert "const" in await found.compile(asked[1])
    finally:
        found.close()


async def test_cancelling_one_request_does_not_affect_others_with_the_same_grammar(
    ordinary: GrammarChecker,
) -> None:
    grammar = json_grammar({"const": "x"})
    first, second = (asyncio.ensure_future(ordinary.compile(grammar)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert "const" in await second


async def test_cache_size_is_limited(
    ordinary: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "_CACHE_BYTES", 5_000)
    for number in range(20):
        await ordinary.compile(json_grammar({"const": str(number) * 200}))
    assert 4_000 <= ordinary.cached_bytes <= 5_000


async def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    found = make_checker()
    try:
        with pytest.raises(RouterError, match="no grammar compiler process can be started"):
            await found.compile(json_grammar({}))
    finally:
        found.close()


async def test_closing_ends_running_compilations() -> None:
    found = make_checker(seconds=60, megabytes=100_000)
    slow = asyncio.ensure_future(found.compile(bomb(20)))
    pid = await started(found)
    found.close()
    with pytest.raises(WorkerError, match="being ended"):
        await slow
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
