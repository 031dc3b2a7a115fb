"""The process that renders chat templates: ``python -m tgi_cli.text.template_process``.

Renders as transformers does (https://huggingface.co/docs/transformers/chat_templating): sandboxed
Jinja with ``raise_exception``, ``strftime_now``, ``tojson``, loop controls and
``{% generation %}`` blocks. Importing transformers for these few definitions would cost half a
second and 18 MB; a test compares the two environments.

Jinja's sandbox limits what a template can access, not its time and memory: ``{{ 'a' * 10**9 }}``
is one of many ways. :mod:`tgi_cli.process.pool_worker` limits those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tgi_cli.process.pool_worker import Reply, Work, serve

_LONGEST_CAUSE = 1000
_JSON_CHARACTERS = 1 << 20
"""Longest text in an answer's JSON, whose reader holds the interpreter lock until it is done."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; it is rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that could give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The constructor alone: the type would expose its attributes to the template."""
    return dict(*args, **kwargs)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _dict
    return environment


class Templates:
    """The templates of one model, compiled by the first job so that its limits hold.

    Args:
        sources: Template sources by name.
        special_tokens: Variables of all renderings.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._environment = _environment()
        self._sources = sources
        self._special_tokens = special_tokens
        self._templates: dict[str, jinja2.Template] = {}

    def __call__(self, body: bytes) -> dict[str, Any]:
        """Run a job.

        ``{"job": "variables"}`` returns ``variables``, the names that the templates use and do
        not set. ``{"job": "render", "name", "most", "given", "variables"}`` returns ``text``, or
        ``exceeded`` if it has more than ``most`` characters. ``given`` takes precedence over the
        special tokens, and they over ``variables``. Either returns ``error`` if the template
        refuses the conversation, or fails.
        """
        try:
            job = json.loads(body)
            return self._variables() if job["job"] == "variables" else self._render(job)
        except MemoryError:
            raise
        except jinja2.exceptions.TemplateError as error:
            return {"error": str(error.message or type(error).__name__)[:_LONGEST_CAUSE]}
        except Exception as error:  # expressions of a template may raise anything
            return {"error": f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]}

    def _variables(self) -> dict[str, Any]:
        found: set[str] = set()
        for name, source in self._sources.items():
            self._template(name)
            found |= jinja2.meta.find_undeclared_variables(self._environment.parse(source))
        return {"variables": sorted(found)}

    def _template(self, name: str) -> jinja2.Template:
        template = self._templates.get(name)
        if template is None:
            template = self._environment.from_string(self._sources[name])
            self._templates[name] = template
        return template

    def _render(self, job: Mapping[str, Any]) -> dict[str, Any]:
        pieces: list[str] = []
        left = job["most"]
        context = {"documents": None, **job["variables"], **self._special_tokens}
        for piece in self._template(job["name"]).generate({**context, **job["given"]}):
            left -= len(piece)
            if left < 0:
                return {"exceeded": True}
            pieces.append(piece)
        return {"text": "".join(pieces)}


def _begin(setup: Any) -> Work:
    work = Templates(setup["sources"], setup["special_tokens"])
    jinja2.Template("{% for a in b %}{{ a | upper }}{% endfor %}").render(b="c")
    return lambda body: _with_text_as_data(work(body))


def _with_text_as_data(answer: dict[str, Any]) -> Reply:
    """The answer, with a long text as UTF-8 after the JSON instead of in it."""
    if len(answer.get("text", "")) <= _JSON_CHARACTERS:
        return answer
    return {}, [answer["text"].encode(errors="surrogatepass")]


if __name__ == "__main__":
    serve(_begin)
