{{ header }}
_tgi() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local command= flags= i
    # Bash takes --flag=value apart.
    if [[ $word == '=' ]]; then
        word=
    elif [[ $previous == '=' ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
            {{ commands | map(attribute="name") | join("|") }}) command=${COMP_WORDS[i]}; break ;;
        esac
    done
    case "$command $previous" in
{% for command in commands %}
{% for setting in command.options if setting is not switch %}
        {%+ for name in setting.flags %}'{{ command.name }} {{ name }}'{{ "|" if not loop.last }}{% endfor %}) {% if setting.kind.choices -%}
            COMPREPLY=($(compgen -W '{{ setting.kind.choices | join(" ") }}' -- "$word")); return
        {%- elif setting is path -%}
            COMPREPLY=($(compgen -f -- "$word")); return
        {%- else -%}
            return
        {%- endif %} ;;
{% endfor %}
{% endfor %}
    esac
    case $command in
{% for command in commands %}
        {{ command.name }}) flags='{{ command.flags | join(" ") }}'; {% if command.operand -%}
            COMPREPLY=($(compgen -W '{{ command.operand | join(" ") }}' -- "$word"))
        {%- elif command.operand is none -%}
            COMPREPLY=()
        {%- else -%}
            COMPREPLY=($(compgen -d -- "$word"))
        {%- endif %} ;;
{% endfor %}
        *) flags='{{ root.flags | join(" ") }}'
            COMPREPLY=($(compgen -W '{{ commands | map(attribute="name") | join(" ") }}' -- "$word")) ;;
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    fi
}
complete -o filenames -F _tgi tgi
