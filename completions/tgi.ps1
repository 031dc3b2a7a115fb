# Completes tgi's commands and flags. Written by `make completions`.
Register-ArgumentCompleter -Native -CommandName tgi -ScriptBlock {
    param($word, $ast, $cursor)
    $help = @{
        'serve' = 'Serve a model over HTTP: TGI''s API and OpenAI''s'
        'env' = 'Show every setting of `tgi serve`, its value, and where it came from'
        'download-weights' = 'Download what serving a model needs; print the folder it is in'
        'warmup' = 'Compile and measure what a server would at its start, so that `tgi serve` starts faster'
        'quantize' = 'Make a quantized checkpoint of a model, for tgi, vLLM and transformers'
        'bench' = 'Measure how fast a model, a shard or a server answers'
        'model-server' = 'Run a model behind a unix socket, for a router to connect to'
        'router' = 'Serve HTTP in front of a model server'
        'completion' = 'Print the script that makes a shell complete tgi''s commands and flags'
    }
    $flags = @{
        '' = @('--version', '-V', '--traceback', '-h', '--help')
        'serve' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--config', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--api-key', '--cors-allow-origin', '--ssl-certfile', '--ssl-keyfile', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--measured-limits', '--no-measured-limits', '--quantize', '--quantize-head', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--cuda-memory-fraction', '--sharded', '--no-sharded', '--num-shard', '--shard-uds-path', '--max-restarts', '--watchdog-timeout', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--watermark-gamma', '--watermark-delta', '--generation-config', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '--env', '-e', '--speculate', '--prometheus-port', '--master-addr', '--master-port', '--usage-stats', '--enable-prefill-logprobs', '--max-image-fetch-size', '--ngrok', '--ngrok-authtoken', '--ngrok-edge', '-h', '--help')
        'env' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--config', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--api-key', '--cors-allow-origin', '--ssl-certfile', '--ssl-keyfile', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--measured-limits', '--no-measured-limits', '--quantize', '--quantize-head', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--cuda-memory-fraction', '--sharded', '--no-sharded', '--num-shard', '--shard-uds-path', '--max-restarts', '--watchdog-timeout', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--watermark-gamma', '--watermark-delta', '--generation-config', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '--env', '-e', '--speculate', '--prometheus-port', '--master-addr', '--master-port', '--usage-stats', '--enable-prefill-logprobs', '--max-image-fetch-size', '--ngrok', '--ngrok-authtoken', '--ngrok-edge', '-h', '--help')
        'download-weights' = @('--model-id', '--revision', '--trust-remote-code', '--config', '--huggingface-hub-cache', '--extension', '--auto-convert', '--no-auto-convert', '--merge-lora', '--logger-level', '--json-output', '--quiet', '-h', '--help')
        'warmup' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--config', '--api-key', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--quantize', '--quantize-head', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--url', '--batch-sizes', '--cuda-memory-fraction', '--sharded', '--no-sharded', '--num-shard', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--logger-level', '--json-output', '-h', '--help')
        'quantize' = @('--inspect', '--method', '--bits', '--groupsize', '--sym', '--asym', '--act-order', '--no-act-order', '--static-groups', '--group-aware', '--no-group-aware', '--mse', '--percdamp', '--format', '--calibration', '--samples', '--seq-len', '--seed', '--include', '--exclude', '--evaluate', '--resume', '--device', '--backend', '--upload-to-model-id', '--revision', '--trust-remote-code', '--logger-level', '--json-output', '-h', '--help')
        'bench' = @('--tokenizer-name', '-t', '--revision', '--master-shard-uds-path', '-m', '--url', '--api-key', '--header', '-H', '--route', '--serve-args', '--timeout', '--batch-size', '-b', '--sequence-length', '-s', '--decode-length', '-d', '--runs', '-r', '--concurrency', '-c', '--rate', '--ramp', '--sweep', '--trace', '--slo', '--slo-share', '--arrival', '--speed', '--duration', '--requests', '-n', '--warmups', '-w', '--input-tokens', '--output-tokens', '--prefix', '--prompts', '--conversations', '--think', '--ignore-eos', '--no-ignore-eos', '--extra-body', '--seed', '--temperature', '--top-k', '--top-p', '--typical-p', '--repetition-penalty', '--frequency-penalty', '--top-n-tokens', '--watermark', '--do-sample', '--output', '-o', '--csv', '--jsonl', '--html', '--markdown', '--svg', '--ui', '-h', '--help')
        'model-server' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--config', '--graceful-termination-timeout', '-g', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--measured-limits', '--no-measured-limits', '--quantize', '--quantize-head', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--cuda-memory-fraction', '--sharded', '--no-sharded', '--num-shard', '--uds-path', '--shard-uds-path', '--engine-listen', '--insecure-tcp', '--engine-tls-cert', '--engine-tls-key', '--engine-tls-client-ca', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--watermark-gamma', '--watermark-delta', '--otlp-endpoint', '--otlp-service-name', '--logger-level', '--json-output', '--speculate', '--master-addr', '--master-port', '-h', '--help')
        'router' = @('--model-id', '--tokenizer-name', '--revision', '--trust-remote-code', '--config', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--api-key', '--cors-allow-origin', '--ssl-certfile', '--ssl-keyfile', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--disable-grammar-support', '--waiting-served-ratio', '--max-waiting-tokens', '--huggingface-hub-cache', '--engine-url', '--master-shard-uds-path', '--engine-tls-cert', '--engine-tls-key', '--engine-tls-ca', '--engine-tls-server-name', '--watchdog-timeout', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--watermark-gamma', '--watermark-delta', '--generation-config', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '--prometheus-port', '--usage-stats', '--enable-prefill-logprobs', '--max-image-fetch-size', '--ngrok', '--ngrok-authtoken', '--ngrok-edge', '-h', '--help')
        'completion' = @('-h', '--help')
    }
    $values = @{
        'serve --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'serve --batching' = @('fused', 'inflight', 'static')
        'serve --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'serve --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'serve --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'serve --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4', 'exl2')
        'serve --load-format' = @('auto', 'dummy')
        'serve --rope-scaling' = @('linear', 'dynamic')
        'serve --generation-config' = @('auto', 'none')
        'serve --tool-call-parser' = @('auto', 'none', 'deepseek', 'glm45', 'harmony', 'hermes', 'llama3_json', 'mistral', 'mistral_list', 'qwen3_coder')
        'serve --reasoning-parser' = @('auto', 'none', 'harmony', 'mistral', 'seed_oss', 'think')
        'serve --usage-stats' = @('on', 'off', 'no-stack')
        'env --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'env --batching' = @('fused', 'inflight', 'static')
        'env --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'env --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'env --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'env --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4', 'exl2')
        'env --load-format' = @('auto', 'dummy')
        'env --rope-scaling' = @('linear', 'dynamic')
        'env --generation-config' = @('auto', 'none')
        'env --tool-call-parser' = @('auto', 'none', 'deepseek', 'glm45', 'harmony', 'hermes', 'llama3_json', 'mistral', 'mistral_list', 'qwen3_coder')
        'env --reasoning-parser' = @('auto', 'none', 'harmony', 'mistral', 'seed_oss', 'think')
        'env --usage-stats' = @('on', 'off', 'no-stack')
        'warmup --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'warmup --batching' = @('fused', 'inflight', 'static')
        'warmup --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'warmup --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'warmup --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'warmup --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4', 'exl2')
        'warmup --load-format' = @('auto', 'dummy')
        'warmup --rope-scaling' = @('linear', 'dynamic')
        'quantize --method' = @('gptq', 'awq', 'rtn', 'fp8', 'int8')
        'quantize --format' = @('gptq', 'gptq_v2', 'awq', 'compressed-tensors')
        'quantize --device' = @('cpu', 'cuda')
        'quantize --backend' = @('builtin', 'gptqmodel')
        'bench --route' = @('auto', 'tgi', 'completions', 'chat')
        'bench --ui' = @('auto', 'tui', 'plain', 'none')
        'model-server --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'model-server --batching' = @('fused', 'inflight', 'static')
        'model-server --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'model-server --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'model-server --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'model-server --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4', 'exl2')
        'model-server --load-format' = @('auto', 'dummy')
        'model-server --rope-scaling' = @('linear', 'dynamic')
        'router --generation-config' = @('auto', 'none')
        'router --tool-call-parser' = @('auto', 'none', 'deepseek', 'glm45', 'harmony', 'hermes', 'llama3_json', 'mistral', 'mistral_list', 'qwen3_coder')
        'router --reasoning-parser' = @('auto', 'none', 'harmony', 'mistral', 'seed_oss', 'think')
        'router --usage-stats' = @('on', 'off', 'no-stack')
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
