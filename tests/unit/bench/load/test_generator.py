"""Requests in their order, and conversations that run."""

from __future__ import annotations

import asyncio

from tgi_cli.bench.events import BenchRequest
from tgi_cli.bench.load.frames import IndexedRequest
from tgi_cli.bench.load.generator import RequestSource


def item(index: int, conversation: int | None = None) -> IndexedRequest:
    return IndexedRequest(
        index, BenchRequest(prompt="x", prompt_tokens=1, max_tokens=1, conversation=conversation)
    )


async def filled(*items: IndexedRequest) -> RequestSource:
    source = RequestSource()
    for one in (*items, None):
        await source.put(one)
    return source


async def test_requests_come_in_their_order() -> None:
    source = await filled(item(0), item(1), item(2))
    found = [taken[0].index for _ in range(3) if (taken := await source.take())]
    assert found == [0, 1, 2]
    assert await source.take() is None
    assert await source.take() is None


async def test_turns_wait_for_their_conversation() -> None:
    source = await filled(item(0, 7), item(1, 7), item(2, 8), item(3, 7), item(4))
    first = await source.take()
    assert first is not None
    _, turns = first
    assert turns is not None
    second = await source.take()  # hands the turn of 7 over on its way
    assert second is not None
    assert second[0].index == 2
    assert (await source.turn(turns) or item(-1)).index == 1
    assert (await source.turn(turns) or item(-1)).index == 3
    assert await source.turn(turns) is None
    third = await source.take()
    assert third is not None
    assert third[0].index == 4


async def test_a_paused_conversation_continues_its_history() -> None:
    source = RequestSource()
    await source.put(item(0, 7))
    await source.put(item(1))
    first = await source.take()
    assert first is not None
    assert first[1] is not None
    first[1].text = "said"
    assert await source.turn(first[1]) is None
    await source.put(item(2, 7))
    await source.put(None)
    assert (await source.take() or (item(-1), None))[0].index == 1
    resumed = await source.take()
    assert resumed is not None
    assert resumed[1] is not None
    assert (resumed[0].index, resumed[1].text) == (2, "said")


async def test_turns_behind_one_that_failed_are_left_out() -> None:
    source = await filled(item(0, 7), item(1, 7), item(2), item(3, 7), item(4))
    first = await source.take()
    assert first is not None
    assert first[1] is not None
    assert (await source.take() or (item(-1), None))[0].index == 2
    first[1].failed = True
    assert await source.turn(first[1]) is None
    assert (await source.take() or (item(-1), None))[0].index == 4
    assert await source.take() is None


async def test_two_who_take_get_different_requests() -> None:
    source = RequestSource()
    taking = [asyncio.create_task(source.take()) for _ in range(3)]
    for number in range(2):
        await source.put(item(number))
    await source.put(None)
    found = [taken[0].index if taken else None for taken in await asyncio.gather(*taking)]
    assert sorted(found, key=str) == [0, 1, None]
