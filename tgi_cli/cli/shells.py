"""Completion scripts of four shells, from the table of settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgi_cli.config.settings.setting import Setting


@dataclass(frozen=True, slots=True)
class CommandWords:
    """A command with its settings, or the program itself."""

    name: str
    help: str
    settings: tuple[Setting, ...]

    @property
    def options(self) -> list[Setting]:
        """The settings that are flags."""
        return [setting for setting in self.settings if not setting.argument]

    @property
    def flags(self) -> list[str]:
        return [flag for setting in self.options for flag in setting.flags]

    @property
    def operand(self) -> tuple[str, ...] | None:
        """The choices of the first argument, empty for a folder, or None without arguments."""
        return next((s.kind.choices for s in self.settings if s.argument), None)


_HEADER = "# Completes tgi's commands and flags. Written by `make completions`."


def bash(root: CommandWords, commands: Sequence[CommandWords]) -> str:
    """For bash 3.2 and later."""
    values, rest = [], []
    for command in commands:
        for setting in command.options:
            if setting.kind.type is bool:
                continue
            pattern = "|".join(f"'{command.name} {name}'" for name in setting.flags)
            choices = " ".join(setting.kind.choices)
            if choices:
                action = f"COMPREPLY=($(compgen -W '{choices}' -- \"$word\")); return"
            elif setting.kind.type is Path:
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
        rest.append(f"        {command.name}) flags='{' '.join(command.flags)}'; {operand} ;;")
    names = [command.name for command in commands]
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
            f"        *) flags='{' '.join(root.flags)}'",
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


def zsh(root: CommandWords, commands: Sequence[CommandWords]) -> str:
    """For zsh's completion system, as a function of the fpath."""
    lines = [
        "#compdef tgi",
        _HEADER,
        "_tgi() {",
        "    local curcontext=$curcontext state line",
        "    typeset -A opt_args",
        "    _arguments -C \\",
        *(f"        {_zsh_flag(setting)} \\" for setting in root.options),
        "        '1: :->command' \\",
        "        '*:: :->rest'",
        "    case $state in",
        "    command)",
        "        local -a commands",
        "        commands=(",
        *(f"            '{c.name}:{_zsh_text(c.help)}'" for c in commands),
        "        )",
        "        _describe command commands",
        "        ;;",
        "    rest)",
        "        case $words[1] in",
    ]
    for command in commands:
        lines.append(f"        {command.name})")
        lines.append("            _arguments \\")
        specs = [_zsh_flag(setting) for setting in command.options]
        if command.operand:
            specs.append(f"'1: :({' '.join(command.operand)})'")
        elif command.operand is not None:
            specs.append("'1:model or folder:_files -/'")
        lines.extend(f"                {spec} \\" for spec in specs[:-1])
        lines.append(f"                {specs[-1]}")
        lines.append("            ;;")
    lines += ["        esac", "        ;;", "    esac", "}", '_tgi "$@"', ""]
    return "\n".join(lines)


def _zsh_flag(setting: Setting) -> str:
    kind, value, equals = setting.kind, "", ""
    if kind.type is not bool:
        action = f"({' '.join(kind.choices)})" if kind.choices else "_files" * (kind.type is Path)
        value, equals = f":{setting.flag[2:]}:{action}", "="
    text = f"[{_zsh_text(_sentence(setting))}]{value}"
    names = [flag + equals * flag.startswith("--") for flag in setting.flags]
    if len(names) == 1:
        return f"'{names[0]}{text}'"
    return f"'({' '.join(setting.flags)})'{{{','.join(names)}}}'{text}'"


def _sentence(setting: Setting) -> str:
    """The first sentence of its help, without the full stop."""
    return setting.help.split(". ")[0].rstrip(".")


def _zsh_text(text: str) -> str:
    for special in "\\[]:":
        text = text.replace(special, f"\\{special}")
    return text.replace("'", "'\\''")


def fish(root: CommandWords, commands: Sequence[CommandWords]) -> str:
    """For fish."""
    lines = [_HEADER, "complete -c tgi -f"]
    lines.extend(_fish_flags("__fish_use_subcommand", root.options))
    for command in commands:
        lines.append(
            f"complete -c tgi -n __fish_use_subcommand -a {command.name} {_fish_help(command.help)}"
        )
    for command in commands:
        condition = f"'__fish_seen_subcommand_from {command.name}'"
        if command.operand:
            lines.append(f"complete -c tgi -n {condition} -a '{' '.join(command.operand)}'")
        elif command.operand is not None:
            lines.append(f"complete -c tgi -n {condition} -a '(__fish_complete_directories)'")
        lines.extend(_fish_flags(condition, command.options))
    return "\n".join([*lines, ""])


def _fish_flags(condition: str, settings: Iterable[Setting]) -> list[str]:
    lines = []
    for setting in settings:
        names = " ".join(
            f"{'-l' if n.startswith('--') else '-s'} {n.lstrip('-')}" for n in setting.flags
        )
        value = ""
        if setting.kind.type is not bool:
            choices = " ".join(setting.kind.choices)
            value = " -r -F" if setting.kind.type is Path else " -x"
            value += f" -a '{choices}'" if choices else ""
        description = _fish_help(_sentence(setting))
        lines.append(f"complete -c tgi -n {condition} {names}{value} {description}")
    return lines


def _fish_help(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"-d '{text}'"


def powershell(root: CommandWords, commands: Sequence[CommandWords]) -> str:
    """For PowerShell 5.1 and later."""
    lines = [
        _HEADER,
        "Register-ArgumentCompleter -Native -CommandName tgi -ScriptBlock {",
        "    param($word, $ast, $cursor)",
        "    $help = @{",
        *(f"        '{command.name}' = {_ps(command.help)}" for command in commands),
        "    }",
        "    $flags = @{",
        f"        '' = @({_ps_words(root.flags)})",
        *(f"        '{command.name}' = @({_ps_words(command.flags)})" for command in commands),
        "    }",
        "    $values = @{",
    ]
    for command in commands:
        if command.operand:
            lines.append(f"        '{command.name}' = @({_ps_words(command.operand)})")
        for setting in command.options:
            for name in setting.flags if setting.kind.choices else ():
                choices = _ps_words(setting.kind.choices)
                lines.append(f"        '{command.name} {name}' = @({choices})")
    lines += [
        "    }",
        '    $words = @($ast.CommandElements | Select-Object -Skip 1 | ForEach-Object { "$_" })',
        "    if ($word -and $words.Count) { $words = @($words | Select-Object -SkipLast 1) }",
        "    $command = [string]($words | Where-Object { $help.ContainsKey($_) } | "
        "Select-Object -First 1)",
        "    $previous = [string]($words | Select-Object -Last 1)",
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


def _ps_words(words: Iterable[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _ps(text: str) -> str:
    quoted = text.replace("'", "''")
    return f"'{quoted}'"
