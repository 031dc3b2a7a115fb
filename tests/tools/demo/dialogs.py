"""Chat examples: questions about documented names, answered by their own documentation.

A definition in a documentation page, a docstring, a glossary entry and a FAQ heading each give
one answer; questions are drawn from templates, so that every epoch asks in other words. A few
dozen hand-written exchanges (`smalltalk.json`) cover greetings and questions about other things.
"""

import ast
import json
import random
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tools.demo.corpus import Document, first_paragraph

Message = dict[str, str]

_ASK_NAME = (
    *(
        "What does {} do?",
        "What is {}?",
        "Explain {}.",
        "Explain {}",
        "Document {}.",
        "Document {}",
    ),
    *("How do I use {}?", "What is {} for?", "Describe {}.", "Tell me about {}."),
    *("Can you explain {}?", "what does {} do", "what is {}", "What does {} do in Python?"),
    *("When should I use {}?", "{}", "How does {} work?", "Please document {}."),
)
_ASK_TERM = (
    *("What is {}?", "Explain {}.", "What does {} mean?", "Define {}.", "Tell me about {}."),
    *("What is {} in Python?", "Describe {}.", "what is {}", "Can you explain {}?"),
)
_ASK_CODE = (
    "Write a Python function `{name}`: {doc}",
    "Write `{name}` in Python. {doc}",
    "Write a function named {name}. {doc}",
    "Show me a function `{name}` in Python. {doc}",
)
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that explains the Python standard library.",
    "Answer briefly.",
    "You are a Python expert.",
    "You are tgi-demo, a small model trained on the Python documentation.",
)
# What people ask about first; their answers are repeated so that a small model keeps them.
_POPULAR = re.compile(
    r"(json|os|os\.path|re|math|random|itertools|functools|collections|datetime|pathlib|textwrap"
    r"|shutil|subprocess|time|threading|asyncio|logging|sys|string|csv|copy|glob|heapq|bisect"
    r"|contextlib|dataclasses|typing|hashlib|statistics|operator|tempfile|argparse|enum|struct)\."
    r"[\w.]+|[a-z_]+|(str|list|dict|set|bytes|int|float)\.\w+"
)
POPULAR_WEIGHT, SMALLTALK_WEIGHT = 3, 25

_DEFINITION = re.compile(
    r"^( *)\.\. (function|method|class|data|attribute|exception|decorator|classmethod"
    r"|staticmethod|coroutinefunction|coroutinemethod|awaitablefunction|property):: *(.+)$"
)
_CURRENT_MODULE = re.compile(r"^\.\. (current)?module:: *(\S+)")


@dataclass(frozen=True)
class Exchange:
    """One answer and what it answers: `kind` chooses the question templates.

    `subject` is a dotted name (`name`), a glossary term (`term`), a function's name (`code`), or
    the whole question (`asked`); `weight` is how often it stands in one epoch.
    """

    kind: str
    subject: str
    answer: str
    weight: int = 1
    doc: str = ""


def collect(documents: Iterable[Document], smalltalk: Path) -> list[Exchange]:
    """Return every exchange that `documents` (held-out ones left out) and `smalltalk` give."""
    named: dict[str, Exchange] = {}
    others: list[Exchange] = []
    for document in documents:
        if document.kind == "docs":
            for exchange in _from_page(document):
                named.setdefault(exchange.subject, exchange)
            if document.name == "glossary":
                others.extend(_from_glossary(document.text))
            if document.name.startswith("faq/"):
                others.extend(_from_faq(document.text))
    for document in documents:
        if document.kind == "code":
            for exchange in _from_module(document):
                if exchange.kind == "code":
                    others.append(exchange)
                else:
                    named.setdefault(exchange.subject, exchange)
    for entry in json.loads(smalltalk.read_text(encoding="utf-8")):
        weight = max(1, SMALLTALK_WEIGHT * 2 // len(entry["ask"]))
        others.extend(Exchange("asked", ask, entry["answer"], weight) for ask in entry["ask"])
    return [*named.values(), *others]


def _named(subject: str, text: str) -> Iterator[Exchange]:
    answer = first_paragraph(text)
    if len(answer) < 20 or answer.startswith((".. ", ">>>", "*Deprecated")):
        return
    weight = POPULAR_WEIGHT if _POPULAR.fullmatch(subject) else 1
    yield Exchange("name", subject, f"`{subject}`: {answer}", weight)


def _from_page(document: Document) -> Iterator[Exchange]:
    """Yield one exchange per directive that defines a name, and one for the page's module."""
    if not document.name.startswith(("library/", "tutorial/")):
        return
    module = ""
    owners: list[tuple[int, str]] = []
    lines = document.text.splitlines()
    for index, line in enumerate(lines):
        if match := _CURRENT_MODULE.match(line):
            module = match.group(2)
            if not match.group(1):
                yield from _named(module, _next_prose(lines[index + 1 :]))
            continue
        match = _DEFINITION.match(line)
        if not match:
            continue
        indent, kind = len(match.group(1)), match.group(2)
        name = re.sub(r"[(\[ ].*", "", match.group(3)).rstrip(".:")
        owners = [(depth, owner) for depth, owner in owners if depth < indent]
        if owners and "." not in name:
            name = f"{owners[-1][1]}.{name}"
        if kind in ("class", "exception"):
            owners.append((indent, name))
        body = lines[index + 1 : index + 40]
        start = next((i for i, text in enumerate(body) if not text.strip()), len(body))
        body = body[start + 1 :]
        depth = len(body[0]) - len(body[0].lstrip()) if body else 0
        if depth > indent and re.fullmatch(r"[\w.]+", name):
            full = name if not module or name.startswith(f"{module}.") else f"{module}.{name}"
            yield from _named(full.removeprefix("builtins."), "\n".join(body))


def _next_prose(lines: list[str]) -> str:
    start = next((i for i, line in enumerate(lines) if line[:1].isalpha()), len(lines))
    return "\n".join(lines[start : start + 30])


def _from_glossary(text: str) -> Iterator[Exchange]:
    for term, body in re.findall(r"^   (\w[^\n]*)\n((?:      [^\n]*\n|\n)+)", text, re.M):
        answer = first_paragraph(body)
        if answer:
            article = "an" if term[0].lower() in "aeiou" else "a"
            yield Exchange("term", term, answer, POPULAR_WEIGHT)
            yield Exchange("term", f"{article} {term}", answer, POPULAR_WEIGHT)


def _from_faq(text: str) -> Iterator[Exchange]:
    for question, body in re.findall(
        r"^([A-Z][^\n]+\?)\n-{5,}\n+(.*?)(?=\n\n|\Z)", text, re.M | re.S
    ):
        answer = first_paragraph(body)
        if len(answer) > 30:
            yield Exchange("asked", question.replace("`", ""), answer, POPULAR_WEIGHT)


def _from_module(document: Document) -> Iterator[Exchange]:
    """Yield one exchange per public docstring, and one per short documented function."""
    module = document.name.replace("/", ".")
    if any(part.startswith("_") for part in module.split(".")):
        return
    try:
        tree = ast.parse(document.text)
    except SyntaxError:  # a shortened table can leave a module unparsable: it has no names then
        return
    module = "os.path" if module == "posixpath" else module
    yield from _named(module, ast.get_docstring(tree) or "")
    for node in tree.body:
        yield from _from_node(node, module, document.text)


def _from_node(node: ast.stmt, owner: str, source: str) -> Iterator[Exchange]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    if node.name.startswith("_"):
        return
    name, docstring = f"{owner}.{node.name}", ast.get_docstring(node) or ""
    yield from _named(name, docstring)
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            yield from _from_node(child, name, source)
        return
    doc = first_paragraph(docstring, limit=120)
    code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
    if doc and 3 <= code.count("\n") <= 14 and len(code) < 600:
        yield Exchange("code", node.name, f"```python\n{code.rstrip()}\n```", doc=doc)


def epoch(exchanges: list[Exchange], rng: random.Random) -> Iterator[list[Message]]:
    """Yield every exchange `weight` times in random order and words, as lists of messages.

    A quarter of the conversations open with a system message, a sixth have two turns.
    """
    order = [exchange for exchange in exchanges for _ in range(exchange.weight)]
    rng.shuffle(order)
    while order:
        turns = [order.pop() for _ in range(2 if rng.random() < 1 / 6 and len(order) > 1 else 1)]
        messages: list[Message] = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
        for exchange in turns:
            messages.append({"role": "user", "content": wording(exchange, rng)})
            messages.append({"role": "assistant", "content": exchange.answer})
        yield messages


def wording(exchange: Exchange, rng: random.Random) -> str:
    """Return one wording of the question that `exchange` answers."""
    if exchange.kind == "asked":
        return exchange.subject
    if exchange.kind == "code":
        return rng.choice(_ASK_CODE).format(name=exchange.subject, doc=exchange.doc)
    if exchange.kind == "term":
        return rng.choice(_ASK_TERM).format(exchange.subject)
    shown = exchange.subject if rng.random() < 2 / 3 else f"`{exchange.subject}`"
    return rng.choice(_ASK_NAME).format(shown)
