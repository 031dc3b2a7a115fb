r"""Regular expressions for text within a JSON string.

Every character has one spelling here: ``\"``, ``\\``, ``\n`` and the like for ``"``, ``\`` and
control characters, itself otherwise (https://www.rfc-editor.org/rfc/rfc8259#section-7). As the
spelling of a text is that of its characters in order, it suffices to replace the characters and
classes of an expression. llguidance's own ``pattern`` of JSON schemas lets ``\"`` through where a
negated class excludes quotes.
"""

from __future__ import annotations

import json
import re

from tgi_cli.text.grammar.grammar import GrammarError

_ESCAPED = '"\\' + "".join(map(chr, range(32)))
"""Characters that JSON strings contain as escapes only."""
_PLAIN = r'["\\\x00-\x1f]'
"""Class of these characters, in a regular expression."""
_SHORT = dict(zip('"\\\b\t\n\f\r', '"\\btnfr', strict=True))
_CONTROLS = frozenset(_ESCAPED) - _SHORT.keys()
_ALL_CONTROLS = "u00(?:0[0-7bef]|1[0-9a-f])"

_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_CODE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\})"
)
_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|.)")
_HARMLESS = re.compile(r"\\p(?:\{[LNM]\w*\}|[LNM])")
"""Classes of letters, numbers and marks: none of them is escaped."""
_GROUP = re.compile(r"\(\?(?::|P?<\w+>)")
_SET_OPERATION = re.compile(r"&&|--|~~|\[")
_FLAGS = frozenset("is")


def quoted_regex(pattern: str, flags: str = "") -> str:
    """The regular expression, in Rust's syntax, of the JSON spellings of what a pattern matches.

    Args:
        flags: ``i`` to ignore case, ``s`` for a dot that matches line feeds.

    Raises:
        GrammarError: It uses what has no equivalent.
    """
    if unknown := set(flags) - _FLAGS:
        raise _unsupported(f"the flag `{min(unknown)}`")
    dot = r"[\x00-\U0010ffff]" if "s" in flags else r"[^\n]"
    found: list[str] = []
    at = 0
    while at < len(pattern):
        end = _atom_end(pattern, at)
        atom = pattern[at:end]
        found.append(_class(dot) if atom == "." else _atom(atom))
        at = end
    body = "".join(found)
    return f"(?i:{body})" if "i" in flags else body


def quoted_literal(text: str, ignores_case: bool = False) -> str:
    """The regular expression of the JSON spelling of one text."""
    if ignores_case:
        return quoted_regex(_literal(text), "i")
    return _literal(json.dumps(text, ensure_ascii=False)[1:-1])


def quoted_range(first: str, last: str) -> str:
    """The regular expression of the JSON spellings of a range of characters."""
    return _class(rf"[\U{ord(first):08x}-\U{ord(last):08x}]")


def _literal(text: str) -> str:
    """A pattern that matches the text alone."""
    return "".join(char if char.isalnum() else rf"\U{ord(char):08x}" for char in text)


def _atom_end(pattern: str, at: int) -> int:
    """The end of the escape, class, group opening or character at a position."""
    char = pattern[at]
    if char == "\\":
        match = _CODE.match(pattern, at) or _PROPERTY.match(pattern, at)
        return match.end() if match else at + 2
    if char == "[":
        return _class_end(pattern, at)
    if pattern.startswith("(?", at):
        match = _GROUP.match(pattern, at)
        if match is None:
            raise _unsupported(f"`{pattern[at : at + 3]}`")
        return match.end()
    return at + 1


def _class_end(pattern: str, at: int) -> int:
    end = at + (2 if pattern.startswith("[^", at) else 1)
    if pattern.startswith("]", end):
        end += 1
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    if end >= len(pattern):
        raise GrammarError(f"invalid regex: the class at position {at} is not closed")
    return end + 1


def _atom(atom: str) -> str:
    if atom.startswith("["):
        return _class(atom)
    if not atom.startswith("\\"):
        return _escapes(atom) if atom in _ESCAPED else atom
    name = atom[1:]
    if name in ("d", "w") or _HARMLESS.fullmatch(atom):
        return atom
    if name in ("s", "S", "D", "W"):
        return _class(f"[{atom}]")
    if not name:
        raise GrammarError("invalid regex: it ends with a backslash")
    if name[0].isalnum() and name not in _LETTERS and not _CODE.match(atom):
        raise _unsupported(f"`{atom}`")
    char = _character(atom)
    return _escapes(char) if char in _ESCAPED else atom


def _character(escape: str) -> str:
    """The character of an escape."""
    match = _CODE.fullmatch(escape)
    if match is None:
        return _LETTERS.get(escape[1:], escape[1:])
    return chr(_code(match))


def _code(match: re.Match[str]) -> int:
    return min(int(next(filter(None, match.groups())), 16), 0x10FFFF)


def _class(text: str) -> str:
    """A class: its plain characters, or the escapes of the others that it has."""
    inner = text[2:-1] if text.startswith("[^") else text[1:-1]
    visible = re.sub(r"\\.", "", inner, flags=re.DOTALL)
    if _SET_OPERATION.search(visible) or _PROPERTY.search(inner):
        raise _unsupported(f"the class {text}")
    python = _CODE.sub(lambda match: f"\\U{_code(match):08x}", text)
    try:
        has = re.compile(python, re.ASCII).fullmatch
    except (re.error, OverflowError) as error:
        raise GrammarError(f"invalid regex: {text}: {error}") from None
    escaped = "".join(char for char in _ESCAPED if has(char))
    if not escaped:
        return text
    return f"(?:[{text}--{_PLAIN}]|{_escapes(escaped)})"


def _escapes(characters: str) -> str:
    """A regular expression of the escapes of these characters, in lower case even with ``i``."""
    given = set(characters)
    spelled = sorted(re.escape(_SHORT[char]) for char in given & _SHORT.keys())
    if given >= _CONTROLS:
        spelled.append(_ALL_CONTROLS)
    else:
        spelled += [f"u{ord(char):04x}" for char in sorted(given & _CONTROLS)]
    return rf"(?-i:\\(?:{'|'.join(spelled)}))"


def _unsupported(what: str) -> GrammarError:
    return GrammarError(f"{what} is not supported in the grammar of a tool")
