"""Warns of parameters that are ignored although they are probably misspelt.

Unknown parameters are ignored, since clients of other servers send theirs. One that is spelled much
like a parameter which the request lacks, as ``max_token``, is rather a mistake.
"""

from __future__ import annotations

import difflib
import logging
import re
from functools import cache, lru_cache
from itertools import islice

import msgspec

logger = logging.getLogger(__name__)

_BODY_BYTES = 64 << 10
"""Larger bodies are those of programs that have been tried before."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{2,39}")
_MOST_LOOKED_UP = 4
"""Unknown names of one request that are looked up, each in up to a millisecond."""
_MOST_LOGGED = 100
_SIMILARITY = 0.8
"""Least ratio of :class:`difflib.SequenceMatcher`: 0.95 of ``max_token`` and ``max_tokens``."""
_NESTED = "parameters"
"""The object of TGI's routes that has their parameters."""

_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MisspellingLog:
    """Logs each misspelt parameter of each route once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def check(self, path: str, raw: bytes, body: object) -> None:
        """Log what is probably misspelt in a request: a JSON object, decoded to ``body``."""
        if len(raw) > _BODY_BYTES or not isinstance(body, msgspec.Struct):
            return
        try:
            keys = _keys.decode(raw)
            found = misspelt(keys, type(body))
            nested = getattr(body, _NESTED, None)
            if _NESTED in keys and isinstance(nested, msgspec.Struct):
                found |= misspelt(_keys.decode(keys[_NESTED]), type(nested))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # names that are no UTF-8, which are ignored
        for name, meant in found.items():
            if (path, name) not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add((path, name))
                logger.warning(
                    "%s: `%s` is not a parameter and is ignored; did you mean `%s`?",
                    path,
                    name,
                    meant,
                )


def misspelt(given: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> dict[str, str]:
    """Names that are no fields of ``kind``, with the field that each resembles and that is absent.

    At most four unknown names are looked at.
    """
    known = _fields(kind)
    unknown = (name for name in given if name not in known and _NAME.fullmatch(name))
    found = {name: _similar(name, kind) for name in islice(unknown, _MOST_LOOKED_UP)}
    return {name: meant for name, meant in found.items() if meant and meant not in given}


@cache
def _fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


@lru_cache(maxsize=1024)
def _similar(name: str, kind: type[msgspec.Struct]) -> str:
    """The field whose name resembles ``name`` most, or an empty string."""
    names = kind.__struct_encode_fields__
    return next(iter(difflib.get_close_matches(name.lower(), names, 1, _SIMILARITY)), "")
