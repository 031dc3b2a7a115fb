{{ header }}
_tgi_names() {
    # A name may have spaces.
    local IFS=$'\n'
    COMPREPLY+=($(compgen "$1" -- "$2"))
}
_tgi() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local command= flags= i
    # Bash takes --flag=value apart.
    if [[ $word == '=' ]]; then
        word=
    elif [[ $previous == '=' ]]; then
        previous=${COMP_WORDS[COMP_CWORD-2]}
    fi
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
            {{ commands | map(attribute="name") | join("|") }}) command=${COMP_WORDS[i]}; break ;;
        esac
    done
    if ((i + 1 < COMP_CWORD)); then
        case "$command ${COMP_WORDS[i+1]}" in
{% for command in commands if command.commands %}
            {% for inner in command.commands %}'{{ inner.path }}'{{ "|" if not loop.last }}{% endfor %}) command+=" ${COMP_WORDS[i+1]}" ;;
{% endfor %}
        esac
    fi
    case "$command $previous" in
{% for command in every %}
{% for setting in command.options if setting is not switch %}
        {%+ for name in setting.flags %}'{{ command.path }} {{ name }}'{{ "|" if not loop.last }}{% endfor %}) {% if setting.kind.choices -%}
            COMPREPLY=($(compgen -W '{{ setting.kind.choices | join(" ") }}' -- "$word")); return
        {%- elif setting | completed_as -%}
            _tgi_names {{ "-d" if setting | completed_as == "folders" else "-f" }} "$word"; return
        {%- else -%}
            return
        {%- endif %} ;;
{% endfor %}
{% endfor %}
    esac
    case $command in
{% for command in every %}
        '{{ command.path }}') flags='{{ command.flags | join(" ") }}'
{%- if command.words %}

            COMPREPLY=($(compgen -W '{{ command.words | join(" ") }}' -- "$word"))
{%- endif %}
{%- if command.names %}

            _tgi_names {{ "-d" if command.names == "folders" else "-f" }} "$word"
{%- endif %} ;;
{% endfor %}
        *) flags='{{ root.flags | join(" ") }}'
            COMPREPLY=($(compgen -W '{{ root.words | join(" ") }}' -- "$word")) ;;
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    fi
}
complete -o filenames -F _tgi tgi
