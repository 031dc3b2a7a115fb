"""instructor, which asks OpenAI's client for an object: by a tool and by a schema."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.system.clients.harness import MESSAGES, call, main, whole


class Function(BaseModel):
    """A function of a library."""

    name: Literal["os.path.join", "os.path.split"]
    arguments: int = Field(ge=0, le=9)


async def _extracts(client: Any, mode: instructor.Mode) -> None:
    make = instructor.from_openai
    patched = make(client, mode=mode)
    found = await whole(
        patched.chat.completions.create(
            model="tgi",
            messages=MESSAGES,
            response_model=Function,
            max_retries=0,
            max_tokens=200,
            temperature=0,
        )
    )
    assert isinstance(found, Function)


@call
async def by_a_tool(client: Any) -> None:
    await _extracts(client, instructor.Mode.TOOLS)


@call
async def by_a_schema(client: Any) -> None:
    await _extracts(client, instructor.Mode.JSON_SCHEMA)


def client_of(kind: Any, url: str) -> Any:
    return kind(base_url=f"{url}/v1", api_key="-", max_retries=0)


main({"sync": partial(client_of, OpenAI), "async": partial(client_of, AsyncOpenAI)})
