"""Small chat templates with the restrictions of published ones."""

from __future__ import annotations

from tgi_cli.text.template_traits import TemplateTraits

_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
"""Takes any role, and knows no tools."""

TOOLS = _TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + _CALLS + "</>{% endfor %}"
"""Takes any conversation, with tools."""

SYSTEM_FIRST = (
    _TOOLS + "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}" + _CALLS + "</>{% endfor %}"
)
"""Refuses a system message after the first message."""

DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' and not (messages | selectattr('role', 'eq', 'system') "
    "| list) %}<system>Be helpful.</>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
"""Has a system message of its own until there is another one, wherever it is."""

TOOLS_WITH_SYSTEM = (
    "{% set has = messages | selectattr('role', 'eq', 'system') | list %}"
    "{% if not has %}" + _TOOLS + "{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'system' and m == has[0] %}" + _TOOLS + "{% endif %}" + _CALLS + "</>"
    "{% endfor %}"
)
"""Describes tools in the first system message, wherever it is."""

SYSTEMS_IN_FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
"""Moves system messages to the front."""

LATER_DROPPED = (
    "{% if messages[0].role in ('system', 'developer') %}<developer>{{ messages[0].content }}</>"
    "{% endif %}{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "<{{ m.role }}>{{ m.content }}</>{% endif %}{% endfor %}"
)
"""Omits system messages after the first message."""

NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
)
"""Refuses system messages, and roles that do not alternate."""

LAST_TURN = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if system else messages %}"
    "{% set turn = namespace(index=0) %}"
    "{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (turn.index % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% set turn.index = turn.index + 1 %}{% endif %}"
    "{% if m.role == 'user' %}"
    "[INST]{% if loop.last and system %}{{ system }} {% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' and m.tool_calls %}"
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    "[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}{{ m.tool_call_id }}[/RESULT]"
    "{% else %}{{ raise_exception('role') }}{% endif %}{% endfor %}"
)
"""Moves the system message to the last turn. Refuses long ids of calls and a user's message behind
a result. Omits the text in front of calls."""

SINGLE_CALLS = (
    _TOOLS + "{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{% set c = m.tool_calls[0] %}"
    "<assistant>{{ c.function.name }}{{ c.function.arguments | tojson }}</>"
    "{% else %}<{{ m.role }}>{{ m.content }}</>{% endif %}{% endfor %}"
)
"""Refuses several calls in a message. Omits the text in front of a call."""

NULL_CONTENT = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}</call>"
    "{% endfor %}{% elif m.role == 'tool' %}<result>{{ m.name }}: {{ m.content }}</result>"
    "{% else %}<{{ m.role }}>{{ m.content }}</>{% endif %}{% endfor %}"
)
"""Writes calls only where the content is null, and their arguments as they are."""

PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "</>{% endfor %}"
)
"""Writes content in parts only."""

NO_EMPTY_REPLY = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.content %}{{ raise_exception('empty') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
"""Refuses messages of the assistant without text."""

STRIPS_THINKING = (
    _TOOLS + "{% set last = namespace(user=-1) %}"
    "{% for m in messages if m.role == 'user' %}{% set last.user = loop.index0 %}{% endfor %}"
    "{% set seen = namespace(users=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set seen.users = seen.users + 1 %}"
    "{% endif %}<{{ m.role }}>{% if m.reasoning_content and seen.users == last.user %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    + _CALLS
    + "</>{% endfor %}"
)
"""Omits the reasoning of turns before the last one."""

TEMPLATES: dict[str, tuple[str, TemplateTraits]] = {
    "plain": (PLAIN, TemplateTraits(developer=False, calls=False, results=False)),
    "tools": (TOOLS, TemplateTraits(developer=False)),
    "system_first": (SYSTEM_FIRST, TemplateTraits(developer=False, later_system=False)),
    "default_system": (
        DEFAULT_SYSTEM,
        TemplateTraits(developer=False, later_system=False, calls=False, results=False),
    ),
    "tools_with_system": (TOOLS_WITH_SYSTEM, TemplateTraits(developer=False, later_system=False)),
    "systems_in_front": (
        SYSTEMS_IN_FRONT,
        TemplateTraits(developer=False, later_system=False, calls=False, results=False),
    ),
    "later_dropped": (
        LATER_DROPPED,
        TemplateTraits(later_system=False, calls=False, results=False),
    ),
    "no_system": (
        NO_SYSTEM,
        TemplateTraits(
            developer=False,
            system=False,
            later_system=False,
            adjacent_users=False,
            adjacent_assistants=False,
            assistant_first=False,
            calls=False,
            results=False,
        ),
    ),
    "last_turn": (
        LAST_TURN,
        TemplateTraits(
            developer=False,
            system=False,
            later_system=False,
            adjacent_users=False,
            adjacent_assistants=False,
            assistant_first=False,
            user_after_result=False,
            calls_with_text=False,
            short_ids=True,
        ),
    ),
    "single_calls": (
        SINGLE_CALLS,
        TemplateTraits(developer=False, calls_with_text=False, parallel_calls=False),
    ),
    "null_content": (
        NULL_CONTENT,
        TemplateTraits(
            developer=False, no_content=None, string_arguments=True, calls_with_text=False
        ),
    ),
    "parts": (
        PARTS,
        TemplateTraits(parts=True, developer=False, calls=False, results=False),
    ),
    "no_empty_reply": (
        NO_EMPTY_REPLY,
        TemplateTraits(developer=False, empty_replies=False, calls=False, results=False),
    ),
    "strips_thinking": (STRIPS_THINKING, TemplateTraits(developer=False)),
}
"""Templates by name, and what they accept."""
