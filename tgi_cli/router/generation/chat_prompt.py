"""From a chat request to a prompt, and to the parser of its response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tgi_cli.process.worker_pool import WorkerError, WorkersBusy
from tgi_cli.router.api.openai_parameters import openai_spec, requested_logprobs
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.generation.chat_messages import TemplateChat, template_chat
from tgi_cli.router.generation.chat_tools import ChatTools, chat_tools
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.structured_output import chat_grammar
from tgi_cli.router.generation.thinking import thinking_budget, thinking_variables
from tgi_cli.router.http import errors
from tgi_cli.router.state import RouterState
from tgi_cli.text.chat_template import ChatTemplate, ChatTemplateError, is_continued
from tgi_cli.text.custom_calls import CustomCallReader, ResponseReader
from tgi_cli.text.response_format import ResponseFormat

INLINE_MESSAGES = 64
"""Most messages and tools of a chat that is read on the event loop. Each costs microseconds,
however long it is; thousands must not delay the tokens of other requests."""
INLINE_CHARACTERS = 64 << 10
"""Longest prompt that is searched for the start of the response on the event loop."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat that is ready to be generated.

    Attributes:
        spec: The prompt and everything that shapes the response.
        continued: End of the prompt that the response continues.
        echoed: Text in front of the response.
        tools: Tools, and which of them the model may call.
        parallel: Whether a response may have several tool calls.
        response_format: How responses are parsed, or None if they are plain text.
    """

    spec: GenerationSpec
    continued: str
    echoed: str
    tools: ChatTools
    parallel: bool
    response_format: ResponseFormat | None

    def parser(self) -> ResponseReader | None:
        """A parser for one response, or None if responses are plain text."""
        if self.response_format is None:
            return None
        prompt = self.spec.prompt
        assert isinstance(prompt, str)
        parser = self.response_format.parser(
            prompt, self.continued, self.tools.allowed, self.parallel
        )
        if parser is not None and self.tools.custom:
            return CustomCallReader(parser, self.tools.custom)
        return parser

    def to_generate(self, end_ids: frozenset[int]) -> GenerationSpec:
        """The spec with the special tokens in its text that :meth:`parser` needs."""
        if self.response_format is None:
            return self.spec
        shown = self.response_format.shown(bool(self.tools.allowed))
        shown = (shown - end_ids - self.spec.stop_token_ids) | self.spec.shown_ids
        return replace(self.spec, shown_ids=shown)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A chat before it is rendered."""

    spec: GenerationSpec
    template: ChatTemplate
    chat: TemplateChat
    variables: Mapping[str, Any]
    tools: ChatTools
    continues: bool


async def render_chat(body: ChatRequest, state: RouterState) -> Conversation:
    """Validate a chat request and render its conversation. Raises ApiError."""
    form = state.text.response_format
    if body.tools and form is not None and not form.loaded:
        await state.workers.run(form.load)
    few = len(body.messages) + len(body.tools or ()) <= INLINE_MESSAGES
    draft = _draft(body, state) if few else await state.workers.run(_draft, body, state)
    prompt = await _rendered(draft, body, state)
    if few and len(prompt) <= INLINE_CHARACTERS:
        return _conversation(draft, prompt, body, state)
    return await state.workers.run(_conversation, draft, prompt, body, state)


def _draft(body: ChatRequest, state: RouterState) -> _Draft:
    for name in ("functions", "function_call"):
        if getattr(body, name) not in (None, [], "none", "auto"):
            raise errors.unsupported(name, f"`{name}` (deprecated by OpenAI: use `tools`)")
    if body.chat_template is not None:
        raise errors.unsupported("chat_template", "a `chat_template` in the request")
    if body.continue_final_message and body.add_generation_prompt:
        raise errors.validation(
            "`continue_final_message` and `add_generation_prompt` contradict each other",
            "continue_final_message",
        )
    if not body.messages:
        raise errors.validation("`messages` cannot be empty", "messages")
    template = state.text.chat_template
    if template is None:
        raise errors.no_template()
    tools = chat_tools(body, state.text.response_format, state.generator.grammars is not None)
    chat = template_chat(
        body, tools.offered, template, state.text.response_format, state.generator.images
    )
    variables = _variables(body, template)
    # Check the parameters first: rendering costs more.
    spec = openai_spec(body, state, top_logprobs=_top_logprobs(body), add_special_tokens=False)
    try:
        continues = is_continued(chat.messages, body.continue_final_message)
    except ChatTemplateError as error:
        raise errors.template(str(error)) from error
    return _Draft(spec, template, chat, variables, tools, continues)


async def _rendered(draft: _Draft, body: ChatRequest, state: RouterState) -> str:
    """The prompt. Raises ApiError."""
    try:
        return await draft.template.render_async(
            draft.chat.messages,
            draft.chat.tools,
            continue_final_message=draft.continues,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=draft.variables,
            image_mark=draft.chat.image_mark,
        )
    except ChatTemplateError as error:
        raise errors.template(str(error)) from error
    except WorkersBusy:
        raise state.admission.overloaded() from None
    except WorkerError as error:
        raise errors.engine_gone(error.cause) from error


def _conversation(
    draft: _Draft, prompt: str, body: ChatRequest, state: RouterState
) -> Conversation:
    chat = draft.chat
    last = chat.behind_images(chat.messages[-1]["content"] or "")
    conversation = Conversation(
        spec=replace(draft.spec, prompt=prompt, prompt_param="messages", images=chat.marks.images),
        continued=last if draft.continues else "",
        echoed=last if _echoes(body, chat.messages[-1]) else "",
        tools=draft.tools,
        parallel=body.parallel_tool_calls is not False,
        response_format=state.text.response_format,
    )
    return replace(conversation, spec=_constrained(conversation, body, state))


def _top_logprobs(body: ChatRequest) -> int:
    """OpenAI's ``top_logprobs``, or TGI's ``top_n_tokens``. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise errors.validation("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    count = requested_logprobs(body.top_logprobs, "top_logprobs")
    return count or requested_logprobs(body.top_n_tokens, "top_n_tokens")


def _echoes(body: ChatRequest, last: Mapping[str, Any]) -> bool:
    """Whether the response begins with the last message: if it has the same role, as in vLLM."""
    same = last["role"] == "assistant" or body.add_generation_prompt is False
    return bool(body.echo) and same


def _constrained(
    conversation: Conversation, body: ChatRequest, state: RouterState
) -> GenerationSpec:
    """The spec with the bounds of the whole response: reasoning, content and tool calls."""
    form, spec = conversation.response_format, conversation.spec
    assert isinstance(spec.prompt, str)
    inside = form is not None and form.is_reasoning(spec.prompt, conversation.continued)
    info, tokenizer = state.client.info, state.text.tokenizer
    thinking = thinking_budget(body, form, inside, tokenizer, info)
    if form is None:
        return spec
    grammar = chat_grammar(
        spec.grammar,
        conversation.tools,
        conversation.parallel,
        form,
        inside,
        constrain=state.generator.grammars is not None,
    )
    return replace(
        spec,
        grammar=grammar,
        reasoning=form.markers if form.markers.open else None,
        is_reasoning=inside,
        thinking=thinking,
    )


def _variables(body: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """Template variables that the request sets. Raises ApiError."""
    variables = thinking_variables(body)
    if body.documents:
        if "documents" not in template.text:
            raise errors.unsupported("documents", "`documents` (not used by the chat template)")
        variables["documents"] = body.documents
    for name, value in (body.chat_template_kwargs or {}).items():
        if not template.accepts(name):
            raise errors.validation(
                f"`chat_template_kwargs` may not set {name!r}: the chat template does not use it, "
                "or the server sets it",
                "chat_template_kwargs",
            )
        variables[name] = value
    return variables
