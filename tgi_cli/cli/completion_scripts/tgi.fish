{% macro complete_flags(condition, settings) %}
{% for setting in settings %}
complete -c tgi -n {{ condition }}
    {%- for name in setting.flags %} {{ "-l" if name.startswith("--") else "-s" }} {{ name.lstrip("-") }}{% endfor %}
    {%- if setting is not switch %}
        {{- " -r -F" if setting | completed_as else " -x" }}
        {%- if setting.kind.choices %} -a '{{ setting.kind.choices | join(" ") }}'{% endif %}
    {%- endif %} -d '{{ setting | sentence | fish_text }}'
{% endfor %}
{% endmacro %}
{% macro complete_operands(condition, command) %}
{% if command.words %}
complete -c tgi -n {{ condition }} -a '{{ command.words | join(" ") }}'
{% endif %}
{% if command.names == "folders" %}
complete -c tgi -n {{ condition }} -a '(__fish_complete_directories)'
{% elif command.names %}
complete -c tgi -n {{ condition }} -F
{% endif %}
{% endmacro %}
{{ header }}
complete -c tgi -f
{{ complete_flags("__fish_use_subcommand", root.options) -}}
{% for command in commands %}
complete -c tgi -n __fish_use_subcommand -a {{ command.name }} -d '{{ command.help | fish_text }}'
{% endfor %}
{% for command in commands %}
{% set seen = "__fish_seen_subcommand_from " ~ command.name %}
{% set within = "__fish_seen_subcommand_from " ~ command.commands | map(attribute="name") | join(" ") %}
{% set condition = "'" ~ seen ~ ("; and not " ~ within if command.commands else "") ~ "'" %}
{{ complete_operands(condition, command) -}}
{{ complete_flags(condition, command.options) -}}
{% for inner in command.commands %}
{% set condition = "'" ~ seen ~ "; and __fish_seen_subcommand_from " ~ inner.name ~ "'" %}
{{ complete_operands(condition, inner) -}}
{{ complete_flags(condition, inner.options) -}}
{% endfor %}
{% endfor %}
