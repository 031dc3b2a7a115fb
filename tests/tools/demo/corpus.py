"""The training text: standard library modules and documentation pages, cleaned.

The modules come from a CPython installation. The pages are the reStructuredText sources that
every built documentation carries in `_sources`: the Debian package `python3.11-doc` has them
under `/usr/share/doc/python3.11/html/_sources`, docs.python.org's download archive (HTML) has
them too, and CPython's own `Doc/` folder works as well.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELDOUT_MODULES = ("cmd", "fileinput", "graphlib", "netrc", "queue", "sched", "shelve")
HELDOUT_PAGES = (
    *(f"library/{name}" for name in HELDOUT_MODULES),
    "howto/sorting",
)

# Tests, generated tables, and applications that are data more than they are library.
_SKIPPED_FOLDERS = {
    *("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"),
    *("turtledemo", "__pycache__", "lib-dynload", "__phello__"),
}
_SKIPPED_MODULES = {"html/entities", "this", "antigravity", "stringprep", "__hello__"}
_SKIPPED_PAGES = re.compile(
    r"whatsnew/(changelog|2\.)|license|copyright|bugs|contents|.*genindex|includes/|distutils/_"
)

_LICENCE = re.compile(r"copyright|licen[cs]e|permission|warrant|all rights reserved", re.I)
_TABLE_ROW = re.compile(r"""^\s*[(\[{]?\s*(b?r?['"]|-?\d|0x|None\b).*,\s*(#.*)?$""")
_TABLE_ROWS_KEPT = 6

_ROLE = re.compile(r":(?:[a-z]+:)?([A-Za-z.+-]+):`([^`]+)`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{1,2}")
_CALLS = {"func", "meth", "cfunc"}
_PLAIN_ROLES = {"term", "ref", "doc", "dfn", "menuselection", "guilabel", "abbr"}
_DROPPED_DIRECTIVE = re.compile(
    r"\.\. (?!(function|method|class|data|attribute|exception|decorator|classmethod|staticmethod"
    r"|coroutinefunction|coroutinemethod|awaitablefunction|property|note|warning|seealso|code-block"
    r"|versionadded|versionchanged|deprecated|rubric|opcode|describe|option|module|doctest|testcode"
    r"|glossary|currentmodule|impl-detail|versionremoved|deprecated-removed|cmdoption|envvar|c:\w+)::)"
)
_DROPPED_LINES = (
    *("**Source code:**", ":noindex:", ":tocdepth:", ":synopsis:"),
    *("+--", "+==", "| "),  # tables drawn with lines
)


@dataclass(frozen=True)
class Document:
    """One training text: `name` as `os/path` or `library/json`, `kind` either `code` or `docs`."""

    name: str
    kind: str
    text: str


def read_modules(stdlib: Path) -> Iterator[Document]:
    """Yield the cleaned modules below `stdlib` in sorted order, held-out ones included."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        name = relative.with_suffix("").as_posix()
        if _SKIPPED_FOLDERS.intersection(relative.parts) or name in _SKIPPED_MODULES:
            continue
        if name.startswith("_sysconfigdata"):
            continue
        text = clean_source(path.read_text(encoding="utf-8", errors="ignore"))
        if len(text) > 200:
            yield Document(name.removesuffix("/__init__"), "code", text)


def read_pages(docs: Path) -> Iterator[Document]:
    """Yield the cleaned documentation pages below `docs` in sorted order, held-out ones included.

    `docs` is a `_sources` folder (`*.rst.txt`) or CPython's `Doc` folder (`*.rst`).
    """
    for path in sorted([*docs.rglob("*.rst.txt"), *docs.rglob("*.rst")]):
        name = path.relative_to(docs).as_posix().removesuffix(".txt").removesuffix(".rst")
        if _SKIPPED_PAGES.match(name):
            continue
        text = clean_page(path.read_text(encoding="utf-8"))
        if len(text) > 200:
            yield Document(name, "docs", text)


def is_heldout(document: Document) -> bool:
    """Whether `document` belongs to the held-out text and must not be trained on."""
    return document.name in (HELDOUT_MODULES if document.kind == "code" else HELDOUT_PAGES)


def clean_source(text: str) -> str:
    """Return Python source without licence banners and without the middle of long tables."""
    lines = [line.rstrip() for line in text.expandtabs().splitlines()]
    lines = list(_without_banners(lines))
    lines = list(_without_tables(lines))
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip() + "\n"


def _without_banners(lines: list[str]) -> Iterator[str]:
    """Drop every block of comment lines that speaks of copyright, and encoding lines."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("#"):
            block.append(line)
            continue
        if block and not _LICENCE.search("\n".join(block)):
            yield from (kept for kept in block if "-*-" not in kept and not kept.startswith("#!"))
        block = []
        yield line


def _without_tables(lines: list[str]) -> Iterator[str]:
    """Keep only the first rows of each run of literal rows: tables teach a small model nothing."""
    run = 0
    for line in lines:
        run = run + 1 if _TABLE_ROW.match(line) else 0
        if run <= _TABLE_ROWS_KEPT:
            yield line


def clean_page(text: str) -> str:
    """Return a reStructuredText page as prose: roles as Markdown code, machinery removed."""
    lines = inline(text.expandtabs()).splitlines()
    kept: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index].rstrip()
        body = line.lstrip()
        index += 1
        if body.startswith(".. module::"):
            indent = len(line) - len(body)
            kept.append(line)
        elif body == ".." or _DROPPED_DIRECTIVE.match(body):
            indent = len(line) - len(body)
        elif body.startswith(_DROPPED_LINES) or body == "--------------":
            continue
        else:
            kept.append(line)
            continue
        # A dropped directive (and a module's options) takes its indented block along.
        while index < len(lines) and _continues(lines, index, indent):
            index += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


def _continues(lines: list[str], index: int, indent: int) -> bool:
    """Whether line `index` is deeper than `indent`, or blank before a line that is."""
    for line in lines[index:]:
        if line.strip():
            return len(line) - len(line.lstrip()) > indent
    return False


def inline(text: str) -> str:
    """Replace reStructuredText roles, links and literals by their Markdown or plain reading."""
    text = _ROLE.sub(_render_role, text)
    text = _LINK.sub(r"\1", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r"\|version\|", "3.11", text)
    return text.replace("\\ ", "").replace("\\*", "*")


def _render_role(match: re.Match[str]) -> str:
    role, content = match.group(1).rsplit(".", 1)[-1], match.group(2)
    titled = re.fullmatch(r"(.*?)\s*<([^>]*)>", content, re.S)
    shown = titled.group(1) if titled else content
    if role == "pep" or role == "rfc":
        return f"{role.upper()} {shown}"
    if role in ("issue", "source"):
        return shown
    if role in _PLAIN_ROLES or (titled and " " in shown):
        return shown
    shown = shown.lstrip("!")
    if shown.startswith("~"):
        shown = shown[1:].rsplit(".", 1)[-1]
    if role in _CALLS and not shown.endswith(")"):
        shown += "()"
    return f"`{shown}`"


def first_paragraph(text: str, limit: int = 280) -> str:
    """Return the first paragraph of `text` on one line, cut after a sentence within `limit`.

    Returns an empty string when no whole sentence fits.
    """
    paragraph = re.split(r"\n\s*\n", textwrap.dedent(text).strip(), maxsplit=1)[0]
    paragraph = " ".join(paragraph.split())
    announces = paragraph.endswith(":")  # the last sentence speaks of an example that is not kept
    while announces or len(paragraph) > limit:
        announces = False
        cut = max(paragraph.rfind(end, 0, len(paragraph) - 1) for end in (". ", "! ", "? "))
        paragraph = paragraph[: cut + 1]
    return paragraph if not paragraph or paragraph[-1] in ".!?" else f"{paragraph}."


def write_heldout(documents: list[Document], folder: Path) -> None:
    """Write the held-out documents of each kind to `source.txt` and `documentation.txt`."""
    for kind, name in (("code", "source.txt"), ("docs", "documentation.txt")):
        texts = [one.text for one in documents if one.kind == kind and is_heldout(one)]
        (folder / name).write_text("\n\n".join(texts), encoding="utf-8")
