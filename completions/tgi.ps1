# Completes tgi's commands and flags. Written by `make completions`.
Register-ArgumentCompleter -Native -CommandName tgi -ScriptBlock {
    param($word, $ast, $cursor)
    $help = @{
        'serve' = 'Serve a model over HTTP: TGI''s API and OpenAI''s'
        'download-weights' = 'Download what serving a model needs; print the folder it is in'
        'warmup' = 'Compile the kernels for this machine''s CPU, if they are not there yet'
        'model-server' = 'Run a model behind a unix socket, for a router to connect to'
        'router' = 'Serve HTTP in front of a model server'
        'completion' = 'Print the script that makes a shell complete tgi''s commands and flags'
    }
    $flags = @{
        '' = @('--version', '-V', '--traceback', '-h', '--help')
        'serve' = @('--model-id', '--revision', '--dtype', '--quantize', '--trust-remote-code', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--batching', '--capacity-policy', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--disable-grammar-support', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--load-format', '--cross-check', '--sharded', '--no-sharded', '--num-shard', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--watermark-gamma', '--watermark-delta', '--generation-config', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--api-key', '--cors-allow-origin', '--ssl-certfile', '--ssl-keyfile', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '-h', '--help')
        'download-weights' = @('--revision', '--extension', '--auto-convert', '--no-auto-convert', '--merge-lora', '--no-merge-lora', '--trust-remote-code', '--no-trust-remote-code', '--logger-level', '--json-output', '--no-json-output', '--quiet', '-h', '--help')
        'warmup' = @('--json-output', '-h', '--help')
        'model-server' = @('--model-id', '--revision', '--dtype', '--quantize', '--trust-remote-code', '--uds-path', '--graceful-termination-timeout', '-g', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--batching', '--capacity-policy', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--disable-grammar-support', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--load-format', '--cross-check', '--sharded', '--no-sharded', '--num-shard', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--logger-level', '--json-output', '-h', '--help')
        'router' = @('--model-id', '--revision', '--trust-remote-code', '--engine-url', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--max-concurrent-requests', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--watermark-gamma', '--watermark-delta', '--generation-config', '--disable-grammar-support', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--api-key', '--cors-allow-origin', '--ssl-certfile', '--ssl-keyfile', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '-h', '--help')
        'completion' = @('-h', '--help')
    }
    $values = @{
        'serve --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'serve --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4', 'exl2')
        'serve --batching' = @('fused', 'inflight', 'static')
        'serve --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'serve --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'serve --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'serve --load-format' = @('auto', 'dummy')
        'serve --generation-config' = @('auto', 'none')
        'serve --tool-call-parser' = @('auto', 'none', 'deepseek', 'glm45', 'harmony', 'hermes', 'llama3_json', 'mistral', 'mistral_list', 'qwen3_coder')
        'serve --reasoning-parser' = @('auto', 'none', 'harmony', 'mistral', 'seed_oss', 'think')
        'model-server --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'model-server --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4', 'exl2')
        'model-server --batching' = @('fused', 'inflight', 'static')
        'model-server --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'model-server --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'model-server --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'model-server --load-format' = @('auto', 'dummy')
        'router --generation-config' = @('auto', 'none')
        'router --tool-call-parser' = @('auto', 'none', 'deepseek', 'glm45', 'harmony', 'hermes', 'llama3_json', 'mistral', 'mistral_list', 'qwen3_coder')
        'router --reasoning-parser' = @('auto', 'none', 'harmony', 'mistral', 'seed_oss', 'think')
        'completion' = @('bash', 'zsh', 'fish', 'powershell')
    }
    $said = @($ast.CommandElements | Select-Object -Skip 1 | ForEach-Object { "$_" })
    if ($word -and $said.Count) { $said = @($said | Select-Object -SkipLast 1) }
    $command = [string]($said | Where-Object { $help.ContainsKey($_) } | Select-Object -First 1)
    $previous = [string]($said | Select-Object -Last 1)
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
