"""Completion scripts of four shells, written from a plain description of the commands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option: its spellings, long and short."""

    names: tuple[str, ...]
    help: str
    takes_value: bool = False
    choices: tuple[str, ...] = ()
    is_path: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command; ``operand`` is None without one, else its choices (none: a folder)."""

    name: str
    help: str
    flags: tuple[Flag, ...]
    operand: tuple[str, ...] | None = None
    commands: tuple[Command, ...] = ()

    @property
    def words(self) -> list[str]:
        """All spellings of all flags."""
        return [name for flag in self.flags for name in flag.names]


_HEADER = "# Completes tgi's commands and flags. Written by `make completions`."


def bash(root: Command) -> str:
    """For bash 3.2 and later."""
    values, rest = [], []
    for command in root.commands:
        for flag in command.flags:
            if not flag.takes_value:
                continue
            pattern = "|".join(f"'{command.name} {name}'" for name in flag.names)
            if flag.choices:
                action = (
                    f"COMPREPLY=($(compgen -W '{' '.join(flag.choices)}' -- \"$word\")); return"
                )
            elif flag.is_path:
                action = 'COMPREPLY=($(compgen -f -- "$word")); return'
            else:
                action = "return"
            values.append(f"        {pattern}) {action} ;;")
        if command.operand:
            operand = f"COMPREPLY=($(compgen -W '{' '.join(command.operand)}' -- \"$word\"))"
        elif command.operand is None:
            operand = "COMPREPLY=()"
        else:
            operand = 'COMPREPLY=($(compgen -d -- "$word"))'
        rest.append(f"        {command.name}) flags='{' '.join(command.words)}'; {operand} ;;")
    names = [command.name for command in root.commands]
    return "\n".join(
        [
            _HEADER,
            "_tgi() {",
            "    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}",
            "    local command= flags= i",
            "    # Bash takes --flag=value apart.",
            "    if [[ $word == '=' ]]; then",
            "        word=",
            "    elif [[ $previous == '=' ]]; then",
            "        previous=${COMP_WORDS[COMP_CWORD-2]}",
            "    fi",
            "    for ((i = 1; i < COMP_CWORD; i++)); do",
            "        case ${COMP_WORDS[i]} in",
            f"            {'|'.join(names)}) command=${{COMP_WORDS[i]}}; break ;;",
            "        esac",
            "    done",
            '    case "$command $previous" in',
            *values,
            "    esac",
            "    case $command in",
            *rest,
            f"        *) flags='{' '.join(root.words)}'",
            f"            COMPREPLY=($(compgen -W '{' '.join(names)}' -- \"$word\")) ;;",
            "    esac",
            "    if [[ $word == -* ]]; then",
            '        COMPREPLY=($(compgen -W "$flags" -- "$word"))',
            "    fi",
            "}",
            "complete -o filenames -F _tgi tgi",
            "",
        ]
    )


def zsh(root: Command) -> str:
    """For zsh's completion system, as a function of the fpath."""
    lines = [
        "#compdef tgi",
        _HEADER,
        "_tgi() {",
        "    local curcontext=$curcontext state line",
        "    typeset -A opt_args",
        "    _arguments -C \\",
        *(f"        {_zsh_flag(flag)} \\" for flag in root.flags),
        "        '1: :->command' \\",
        "        '*:: :->rest'",
        "    case $state in",
        "    command)",
        "        local -a commands",
        "        commands=(",
        *(f"            '{c.name}:{_zsh_text(c.help)}'" for c in root.commands),
        "        )",
        "        _describe command commands",
        "        ;;",
        "    rest)",
        "        case $words[1] in",
    ]
    for command in root.commands:
        lines.append(f"        {command.name})")
        lines.append("            _arguments \\")
        specs = [_zsh_flag(flag) for flag in command.flags]
        if command.operand:
            specs.append(f"'1: :({' '.join(command.operand)})'")
        elif command.operand is not None:
            specs.append("'1:model or folder:_files -/'")
        lines.extend(f"                {spec} \\" for spec in specs[:-1])
        lines.append(f"                {specs[-1]}")
        lines.append("            ;;")
    lines += ["        esac", "        ;;", "    esac", "}", '_tgi "$@"', ""]
    return "\n".join(lines)


def _zsh_flag(flag: Flag) -> str:
    value = ""
    if flag.takes_value:
        label = flag.names[0].lstrip("-")
        action = f"({' '.join(flag.choices)})" if flag.choices else "_files" * flag.is_path
        value = f":{label}:{action}"
    equals = {name: "=" * (flag.takes_value and name.startswith("--")) for name in flag.names}
    text = f"[{_zsh_text(flag.help)}]{value}"
    if len(flag.names) == 1:
        return f"'{flag.names[0]}{equals[flag.names[0]]}{text}'"
    spellings = ",".join(f"{name}{equals[name]}" for name in flag.names)
    return f"'({' '.join(flag.names)})'{{{spellings}}}'{text}'"


def _zsh_text(text: str) -> str:
    for special in "\\[]:":
        text = text.replace(special, f"\\{special}")
    return text.replace("'", "'\\''")


def fish(root: Command) -> str:
    """For fish."""
    lines = [_HEADER, "complete -c tgi -f"]
    lines.extend(_fish_flags("__fish_use_subcommand", root.flags))
    for command in root.commands:
        lines.append(
            f"complete -c tgi -n __fish_use_subcommand -a {command.name} {_fish_help(command.help)}"
        )
    for command in root.commands:
        condition = f"'__fish_seen_subcommand_from {command.name}'"
        if command.operand:
            lines.append(f"complete -c tgi -n {condition} -a '{' '.join(command.operand)}'")
        elif command.operand is not None:
            lines.append(f"complete -c tgi -n {condition} -a '(__fish_complete_directories)'")
        lines.extend(_fish_flags(condition, command.flags))
    return "\n".join([*lines, ""])


def _fish_flags(condition: str, flags: Iterable[Flag]) -> list[str]:
    lines = []
    for flag in flags:
        names = " ".join(
            f"{'-l' if n.startswith('--') else '-s'} {n.lstrip('-')}" for n in flag.names
        )
        value = ""
        if flag.takes_value:
            value = " -r -F" if flag.is_path else " -x"
            value += f" -a '{' '.join(flag.choices)}'" if flag.choices else ""
        lines.append(f"complete -c tgi -n {condition} {names}{value} {_fish_help(flag.help)}")
    return lines


def _fish_help(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"-d '{text}'"


def powershell(root: Command) -> str:
    """For PowerShell 5.1 and later."""
    lines = [
        _HEADER,
        "Register-ArgumentCompleter -Native -CommandName tgi -ScriptBlock {",
        "    param($word, $ast, $cursor)",
        "    $help = @{",
        *(f"        '{command.name}' = {_ps(command.help)}" for command in root.commands),
        "    }",
        "    $flags = @{",
        f"        '' = @({_ps_flags(root)})",
        *(f"        '{command.name}' = @({_ps_flags(command)})" for command in root.commands),
        "    }",
        "    $values = @{",
    ]
    for command in root.commands:
        if command.operand:
            lines.append(f"        '{command.name}' = @({_ps_words(command.operand)})")
        for flag in command.flags:
            for name in flag.names if flag.choices else ():
                lines.append(f"        '{command.name} {name}' = @({_ps_words(flag.choices)})")
    lines += [
        "    }",
        '    $said = @($ast.CommandElements | Select-Object -Skip 1 | ForEach-Object { "$_" })',
        "    if ($word -and $said.Count) { $said = @($said | Select-Object -SkipLast 1) }",
        "    $command = [string]($said | Where-Object { $help.ContainsKey($_) } | "
        "Select-Object -First 1)",
        "    $previous = [string]($said | Select-Object -Last 1)",
        '    if ($values.ContainsKey("$command $previous")) {',
        '        $found = $values["$command $previous"]',
        "    } elseif ($word -like '-*') {",
        "        $found = $flags[$command]",
        "    } elseif (-not $command) {",
        "        $found = $help.Keys | Sort-Object",
        "    } else {",
        "        $found = $values[$command]",
        "    }",
        '    $found | Where-Object { $_ -like "$word*" } | ForEach-Object {',
        "        $tip = if ($help.ContainsKey($_)) { $help[$_] } else { $_ }",
        "        [System.Management.Automation.CompletionResult]::new("
        "$_, $_, 'ParameterValue', $tip)",
        "    }",
        "}",
        "",
    ]
    return "\n".join(lines)


def _ps_flags(command: Command) -> str:
    return _ps_words(command.words)


def _ps_words(words: Iterable[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _ps(text: str) -> str:
    quoted = text.replace("'", "''")
    return f"'{quoted}'"
