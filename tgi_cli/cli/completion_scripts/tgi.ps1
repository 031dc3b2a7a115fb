{{ header }}
Register-ArgumentCompleter -Native -CommandName tgi -ScriptBlock {
    param($word, $ast, $cursor)
    $help = @{
{% for command in commands %}
        '{{ command.name }}' = '{{ command.help | replace("'", "''") }}'
{% endfor %}
    }
    $flags = @{
        '' = @({{ root.flags | powershell_words }})
{% for command in every %}
        '{{ command.path }}' = @({{ command.flags | powershell_words }})
{% endfor %}
    }
    # Where there is nothing, PowerShell completes files.
    $values = @{
{% for command in every %}
{% if command.words %}
        '{{ command.path }}' = @({{ command.words | powershell_words }})
{% endif %}
{% for setting in command.options if setting.kind.choices %}
{% for name in setting.flags %}
        '{{ command.path }} {{ name }}' = @({{ setting.kind.choices | powershell_words }})
{% endfor %}
{% endfor %}
{% endfor %}
    }
    $words = @($ast.CommandElements | Select-Object -Skip 1 | ForEach-Object { "$_" })
    if ($word -and $words.Count) { $words = @($words | Select-Object -SkipLast 1) }
    $command = [string]($words | Where-Object { $help.ContainsKey($_) } | Select-Object -First 1)
    $inner = "$command " + [string]($words | Select-Object -Skip ([array]::IndexOf($words, $command) + 1) -First 1)
    if ($command -and $flags.ContainsKey($inner)) { $command = $inner }
    $previous = [string]($words | Select-Object -Last 1)
    if ($values.ContainsKey("$command $previous")) {
        $found = $values["$command $previous"]
    } elseif ($word -like '-*') {
        $found = $flags[$command]
    } elseif (-not $command) {
        $found = $help.Keys | Sort-Object
    } else {
        $found = $values[$command]
    }
    $found | Where-Object { $_ -like "$word*" } | ForEach-Object {
        $tip = if ($help.ContainsKey($_)) { $help[$_] } else { $_ }
        [System.Management.Automation.CompletionResult]::new($_, $_, 'ParameterValue', $tip)
    }
}
