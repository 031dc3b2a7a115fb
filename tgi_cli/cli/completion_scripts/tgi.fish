{% macro complete_flags(condition, settings) %}
{% for setting in settings %}
complete -c tgi -n {{ condition }}
    {%- for name in setting.flags %} {{ "-l" if name.startswith("--") else "-s" }} {{ name.lstrip("-") }}{% endfor %}
    {%- if setting is not switch %}
        {{- " -r -F" if setting is path else " -x" }}
        {%- if setting.kind.choices %} -a '{{ setting.kind.choices | join(" ") }}'{% endif %}
    {%- endif %} -d '{{ setting | sentence | fish_text }}'
{% endfor %}
{% endmacro %}
{{ header }}
complete -c tgi -f
{{ complete_flags("__fish_use_subcommand", root.options) -}}
{% for command in commands %}
complete -c tgi -n __fish_use_subcommand -a {{ command.name }} -d '{{ command.help | fish_text }}'
{% endfor %}
{% for command in commands %}
{% set condition = "'__fish_seen_subcommand_from " ~ command.name ~ "'" %}
{% if command.operand %}
complete -c tgi -n {{ condition }} -a '{{ command.operand | join(" ") }}'
{% elif command.operand is not none %}
complete -c tgi -n {{ condition }} -a '(__fish_complete_directories)'
{% endif %}
{{ complete_flags(condition, command.options) -}}
{% endfor %}
