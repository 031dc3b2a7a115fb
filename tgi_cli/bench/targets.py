"""What is behind an address: a shard's socket, TGI's routes, or OpenAI's; its model, its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from tgi_cli.bench.records import Target
from tgi_cli.bench.settings import Settings, TokenCounter


@dataclass(frozen=True)
class Found:
    """A target that answered.

    Attributes:
        tokenizer: of its model; where no other could be had one that guesses (``exact`` False).
        notes: for ``Run.notes``: how tokens are counted where that is not the plain way.
    """

    target: Target
    tokenizer: TokenCounter
    notes: list[str] = field(default_factory=list)


async def find(
    address: str,
    settings: Settings,
    *,
    tokenizer_name: str = "",
    revision: str = "",
    started_here: list[str] | None = None,
) -> Found:
    """Ask what is at ``address``: a URL, or a path (also ``unix://...``) of a shard's socket.

    A URL may end in ``/v1``. The tokenizer is ``tokenizer_name``'s (a folder or a model id of the
    hub), else that of the model that the server names, else the server's own /tokenize, else a
    guess, of which a note tells.

    Raises:
        ConfigError: no address, or a server that is neither TGI's nor OpenAI's.
        RouterError: the URL cannot be reached, or refuses the key.
        ShardError: nothing listens on the socket, or it does not speak generate.v3.
        HubError, ModelError: ``tokenizer_name`` cannot be had.
    """
    raise NotImplementedError
