# Completes tgi's commands and flags. Written by `make completions`.
Register-ArgumentCompleter -Native -CommandName tgi -ScriptBlock {
    param($word, $ast, $cursor)
    $help = @{
        'serve' = 'Serve a model: the APIs of TGI, OpenAI and Anthropic'
        'chat' = 'Chat with a model in the terminal, or in a pipe'
        'env' = 'Show every setting of `tgi serve`, its value and its source'
        'download-weights' = 'Download a model; print the folder of its files'
        'warmup' = 'Compile and measure ahead for a faster `tgi serve`'
        'quantize' = 'Create a quantized checkpoint of a model'
        'bench' = 'Benchmark a model, a shard or a server'
        'model-server' = 'Run a model behind a unix socket, for a router'
        'router' = 'Serve HTTP in front of a model server'
        'connect' = 'Print or write the settings of a client, such as Codex'
        'deploy' = 'Print files for Docker or Kubernetes, or deploy on Ray'
        'completion' = 'Print the script that completes commands in a shell'
    }
    $flags = @{
        '' = @('--version', '-V', '--traceback', '--help', '-h')
        'serve' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--no-trust-remote-code', '--config', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--api-key', '--api-key-file', '--cors-allow-origin', '--disable-web-ui', '--ssl-certfile', '--ssl-keyfile', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--max-prefill-delay', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dir', '--kv-cache-dir-size', '--kv-offloading-size', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--state-prefill', '--measured-limits', '--no-measured-limits', '--speculate', '--speculative-model', '--speculative-config', '--sharded', '--no-sharded', '--num-shard', '--pipeline-parallel-size', '--nnodes', '--node-rank', '--master-addr', '--master-port', '--node-secret-file', '--replicas', '--cuda-memory-fraction', '--shard-uds-path', '--quantize', '--quantize-head', '--quantize-head-bits', '--quantize-activations', '--no-quantize-activations', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--model-gguf', '--tokenizer-name', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--served-model-name', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--response-store-bytes', '--response-store-seconds', '--watermark-gamma', '--watermark-delta', '--generation-config', '--cache-threshold', '--balance-abs-threshold', '--balance-rel-threshold', '--media-fetch', '--allowed-media-domains', '--allow-private-media', '--allowed-local-media-path', '--media-fetch-timeout', '--max-image-fetch-size', '--max-image-pixels', '--max-images', '--image-workers', '--chat-template', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '--no-json-output', '--env', '-e', '--max-restarts', '--watchdog-timeout', '--sleep-idle-seconds', '--enable-sleep-mode', '--models', '--models-max', '--models-memory', '--model-residence-seconds', '--model-queue-size', '--model-wait-seconds', '--distributed', '--ray-address', '--ray-application', '--ray-fronts', '--min-replicas', '--max-replicas', '--replica-cpus', '--stage-placement', '--target-ongoing-requests', '--target-kv-usage', '--prometheus-port', '--usage-stats', '--enable-prefill-logprobs', '--ngrok', '--ngrok-authtoken', '--ngrok-edge', '--help', '-h', '--help-all')
        'chat' = @('--model', '-m', '--api-key', '--serve-args', '--timeout', '--prompt', '-p', '--system', '-s', '--image', '-i', '--load', '--no-history', '--temperature', '-t', '--max-tokens', '-n', '--set', '--help', '-h', '--help-all')
        'env' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--no-trust-remote-code', '--config', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--api-key', '--api-key-file', '--cors-allow-origin', '--disable-web-ui', '--ssl-certfile', '--ssl-keyfile', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--max-prefill-delay', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dir', '--kv-cache-dir-size', '--kv-offloading-size', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--state-prefill', '--measured-limits', '--no-measured-limits', '--speculate', '--speculative-model', '--speculative-config', '--sharded', '--no-sharded', '--num-shard', '--pipeline-parallel-size', '--nnodes', '--node-rank', '--master-addr', '--master-port', '--node-secret-file', '--replicas', '--cuda-memory-fraction', '--shard-uds-path', '--quantize', '--quantize-head', '--quantize-head-bits', '--quantize-activations', '--no-quantize-activations', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--model-gguf', '--tokenizer-name', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--served-model-name', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--response-store-bytes', '--response-store-seconds', '--watermark-gamma', '--watermark-delta', '--generation-config', '--cache-threshold', '--balance-abs-threshold', '--balance-rel-threshold', '--media-fetch', '--allowed-media-domains', '--allow-private-media', '--allowed-local-media-path', '--media-fetch-timeout', '--max-image-fetch-size', '--max-image-pixels', '--max-images', '--image-workers', '--chat-template', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '--no-json-output', '--env', '-e', '--max-restarts', '--watchdog-timeout', '--sleep-idle-seconds', '--enable-sleep-mode', '--models', '--models-max', '--models-memory', '--model-residence-seconds', '--model-queue-size', '--model-wait-seconds', '--distributed', '--ray-address', '--ray-application', '--ray-fronts', '--min-replicas', '--max-replicas', '--replica-cpus', '--stage-placement', '--target-ongoing-requests', '--target-kv-usage', '--prometheus-port', '--usage-stats', '--enable-prefill-logprobs', '--ngrok', '--ngrok-authtoken', '--ngrok-edge', '--help', '-h', '--help-all')
        'download-weights' = @('--model-id', '--revision', '--trust-remote-code', '--no-trust-remote-code', '--config', '--model-gguf', '--tokenizer-name', '--huggingface-hub-cache', '--extension', '--auto-convert', '--no-auto-convert', '--merge-lora', '--no-merge-lora', '--quiet', '--logger-level', '--json-output', '--no-json-output', '--help', '-h', '--help-all')
        'warmup' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--no-trust-remote-code', '--config', '--api-key', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--max-prefill-delay', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dir', '--kv-cache-dir-size', '--kv-offloading-size', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--state-prefill', '--speculate', '--speculative-model', '--speculative-config', '--sharded', '--no-sharded', '--num-shard', '--pipeline-parallel-size', '--nnodes', '--node-rank', '--master-addr', '--master-port', '--node-secret-file', '--cuda-memory-fraction', '--quantize', '--quantize-head', '--quantize-head-bits', '--quantize-activations', '--no-quantize-activations', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--model-gguf', '--tokenizer-name', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--url', '--batch-sizes', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--logger-level', '--json-output', '--no-json-output', '--help', '-h', '--help-all')
        'quantize' = @('--revision', '--trust-remote-code', '--no-trust-remote-code', '--config', '--logger-level', '--json-output', '--no-json-output', '--inspect', '--upload-to-model-id', '--method', '--bits', '--groupsize', '--sym', '--asym', '--act-order', '--no-act-order', '--static-groups', '--group-aware', '--no-group-aware', '--mse', '--percdamp', '--format', '--calibration', '--samples', '--seq-len', '--seed', '--include', '--exclude', '--evaluate', '--resume', '--device', '--backend', '--help', '-h', '--help-all')
        'bench' = @('--revision', '--config', '--tokenizer-name', '-t', '--master-shard-uds-path', '-m', '--url', '--api-key', '--header', '-H', '--route', '--serve-args', '--timeout', '--batch-size', '-b', '--sequence-length', '-s', '--decode-length', '-d', '--runs', '-r', '--concurrency', '-c', '--rate', '--ramp', '--sweep', '--trace', '--slo', '--slo-share', '--arrival', '--speed', '--duration', '--requests', '-n', '--warmups', '-w', '--input-tokens', '--output-tokens', '--prefix', '--images', '--prompts', '--conversations', '--think', '--ignore-eos', '--no-ignore-eos', '--extra-body', '--seed', '--temperature', '--top-k', '--top-p', '--typical-p', '--repetition-penalty', '--frequency-penalty', '--top-n-tokens', '--watermark', '--do-sample', '--output', '-o', '--csv', '--jsonl', '--html', '--markdown', '--svg', '--ui', '--help', '-h', '--help-all')
        'bench view' = @('--csv', '--html', '--markdown', '--svg', '--ui', '--help', '-h', '--help-all')
        'bench compare' = @('--markdown', '--fail-on', '--help', '-h', '--help-all')
        'model-server' = @('--model-id', '--revision', '--dtype', '--trust-remote-code', '--no-trust-remote-code', '--config', '--graceful-termination-timeout', '-g', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--max-prefill-delay', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dir', '--kv-cache-dir-size', '--kv-offloading-size', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--state-prefill', '--measured-limits', '--no-measured-limits', '--speculate', '--speculative-model', '--speculative-config', '--sharded', '--no-sharded', '--num-shard', '--pipeline-parallel-size', '--nnodes', '--node-rank', '--master-addr', '--master-port', '--node-secret-file', '--cuda-memory-fraction', '--uds-path', '--shard-uds-path', '--quantize', '--quantize-head', '--quantize-head-bits', '--quantize-activations', '--no-quantize-activations', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--model-gguf', '--tokenizer-name', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--watermark-gamma', '--watermark-delta', '--otlp-endpoint', '--otlp-service-name', '--logger-level', '--json-output', '--no-json-output', '--engine-listen', '--insecure-tcp', '--engine-tls-cert', '--engine-tls-key', '--engine-tls-client-ca', '--help', '-h', '--help-all')
        'router' = @('--model-id', '--tokenizer-name', '--revision', '--trust-remote-code', '--no-trust-remote-code', '--config', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--api-key', '--api-key-file', '--cors-allow-origin', '--disable-web-ui', '--ssl-certfile', '--ssl-keyfile', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--disable-grammar-support', '--waiting-served-ratio', '--max-waiting-tokens', '--huggingface-hub-cache', '--served-model-name', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--response-store-bytes', '--response-store-seconds', '--watermark-gamma', '--watermark-delta', '--generation-config', '--cache-threshold', '--balance-abs-threshold', '--balance-rel-threshold', '--media-fetch', '--allowed-media-domains', '--allow-private-media', '--allowed-local-media-path', '--media-fetch-timeout', '--max-image-fetch-size', '--max-image-pixels', '--max-images', '--image-workers', '--chat-template', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '--no-json-output', '--engine-url', '--replica-url', '--master-shard-uds-path', '--engine-tls-cert', '--engine-tls-key', '--engine-tls-ca', '--engine-tls-server-name', '--watchdog-timeout', '--prometheus-port', '--usage-stats', '--enable-prefill-logprobs', '--ngrok', '--ngrok-authtoken', '--ngrok-edge', '--help', '-h', '--help-all')
        'connect' = @('--model', '--api-key-env', '--api-key', '--write', '--file', '--help', '-h', '--help-all')
        'deploy' = @('--output', '-o', '--force', '--name', '--image', '--memory', '--cpus', '--cpuset-cpus', '--cpuset-mems', '--gpus', '--keys', '--no-keys', '--hf-token-file', '--namespace', '--storage', '--storage-class', '--nodes', '--pods', '--autoscale', '--max-pods', '--target-queue', '--target-token-latency', '--prometheus-url', '--gateway', '--monitoring', '--model-id', '--revision', '--dtype', '--trust-remote-code', '--no-trust-remote-code', '--config', '--hostname', '--port', '-p', '--graceful-termination-timeout', '-g', '--api-key', '--api-key-file', '--cors-allow-origin', '--disable-web-ui', '--ssl-certfile', '--ssl-keyfile', '--max-concurrent-requests', '--max-input-tokens', '--max-input-length', '--max-total-tokens', '--max-batch-prefill-tokens', '--max-batch-total-tokens', '--max-batch-size', '--max-queued-requests', '--max-queued-tokens', '--disable-grammar-support', '--batching', '--capacity-policy', '--max-prefill-delay', '--waiting-served-ratio', '--max-waiting-tokens', '--prefix-caching', '--no-prefix-caching', '--kv-cache-dir', '--kv-cache-dir-size', '--kv-offloading-size', '--kv-cache-dtype', '--attention', '--cuda-graphs', '--state-prefill', '--measured-limits', '--no-measured-limits', '--speculate', '--speculative-model', '--speculative-config', '--sharded', '--no-sharded', '--num-shard', '--pipeline-parallel-size', '--nnodes', '--node-rank', '--master-addr', '--master-port', '--node-secret-file', '--replicas', '--cuda-memory-fraction', '--shard-uds-path', '--quantize', '--quantize-head', '--quantize-head-bits', '--quantize-activations', '--no-quantize-activations', '--load-format', '--cross-check', '--rope-scaling', '--rope-factor', '--model-gguf', '--tokenizer-name', '--disable-custom-kernels', '--huggingface-hub-cache', '--weights-cache-override', '--lora-adapters', '--max-loras', '--max-cpu-loras', '--max-lora-rank', '--served-model-name', '--max-best-of', '--max-stop-sequences', '--max-top-n-tokens', '--max-client-batch-size', '--validation-workers', '--payload-limit', '--response-store-bytes', '--response-store-seconds', '--watermark-gamma', '--watermark-delta', '--generation-config', '--cache-threshold', '--balance-abs-threshold', '--balance-rel-threshold', '--media-fetch', '--allowed-media-domains', '--allow-private-media', '--allowed-local-media-path', '--media-fetch-timeout', '--max-image-fetch-size', '--max-image-pixels', '--max-images', '--image-workers', '--chat-template', '--tokenizer-config-path', '--tool-call-parser', '--reasoning-parser', '--otlp-endpoint', '--otlp-service-name', '--vllm-metrics', '--logger-level', '--json-output', '--no-json-output', '--env', '-e', '--max-restarts', '--watchdog-timeout', '--sleep-idle-seconds', '--enable-sleep-mode', '--models', '--models-max', '--models-memory', '--model-residence-seconds', '--model-queue-size', '--model-wait-seconds', '--distributed', '--ray-address', '--ray-application', '--ray-fronts', '--min-replicas', '--max-replicas', '--replica-cpus', '--stage-placement', '--target-ongoing-requests', '--target-kv-usage', '--prometheus-port', '--usage-stats', '--enable-prefill-logprobs', '--ngrok', '--ngrok-authtoken', '--ngrok-edge', '--help', '-h', '--help-all')
        'completion' = @('--help', '-h', '--help-all')
    }
    # Where there is nothing, PowerShell completes files.
    $values = @{
        'serve --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'serve --batching' = @('fused', 'inflight', 'static')
        'serve --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'serve --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'serve --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'serve --state-prefill' = @('recurrent', 'chunked')
        'serve --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'exl2', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4')
        'serve --load-format' = @('auto', 'stream', 'dummy')
        'serve --rope-scaling' = @('linear', 'dynamic')
        'serve --generation-config' = @('auto', 'none')
        'serve --tool-call-parser' = @('auto', 'none', 'apertus', 'cohere', 'deepseek', 'deepseek_v31', 'deepseek_v32', 'deepseek_v4', 'functionary', 'functiongemma', 'functools', 'gemma4', 'gigachat3', 'gigachat31', 'glm45', 'glm47', 'granite', 'granite_20b', 'harmony', 'hermes', 'hunyuan_v3', 'internlm', 'jamba', 'kimi_k2', 'kimi_k3', 'lfm2', 'llama3_json', 'longcat', 'longcat_v2', 'minicpm5', 'minimax', 'minimax_m2', 'mistral', 'mistral_list', 'nemotron', 'olmo3', 'phi4_mini', 'pythonic', 'qwen3_coder', 'seed_oss', 'solar', 'step3', 'xlam')
        'serve --reasoning-parser' = @('auto', 'none', 'apertus', 'apriel', 'cohere', 'gemma4', 'granite', 'harmony', 'hunyuan_v3', 'kimi', 'kimi_k3', 'longcat', 'minimax_m3', 'mistral', 'seed_oss', 'solar', 'think', 'think_answer', 'think_response')
        'serve --distributed' = @('ray')
        'serve --stage-placement' = @('pack', 'spread', 'strict-pack', 'strict-spread')
        'serve --usage-stats' = @('on', 'off', 'no-stack')
        'env --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'env --batching' = @('fused', 'inflight', 'static')
        'env --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'env --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'env --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'env --state-prefill' = @('recurrent', 'chunked')
        'env --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'exl2', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4')
        'env --load-format' = @('auto', 'stream', 'dummy')
        'env --rope-scaling' = @('linear', 'dynamic')
        'env --generation-config' = @('auto', 'none')
        'env --tool-call-parser' = @('auto', 'none', 'apertus', 'cohere', 'deepseek', 'deepseek_v31', 'deepseek_v32', 'deepseek_v4', 'functionary', 'functiongemma', 'functools', 'gemma4', 'gigachat3', 'gigachat31', 'glm45', 'glm47', 'granite', 'granite_20b', 'harmony', 'hermes', 'hunyuan_v3', 'internlm', 'jamba', 'kimi_k2', 'kimi_k3', 'lfm2', 'llama3_json', 'longcat', 'longcat_v2', 'minicpm5', 'minimax', 'minimax_m2', 'mistral', 'mistral_list', 'nemotron', 'olmo3', 'phi4_mini', 'pythonic', 'qwen3_coder', 'seed_oss', 'solar', 'step3', 'xlam')
        'env --reasoning-parser' = @('auto', 'none', 'apertus', 'apriel', 'cohere', 'gemma4', 'granite', 'harmony', 'hunyuan_v3', 'kimi', 'kimi_k3', 'longcat', 'minimax_m3', 'mistral', 'seed_oss', 'solar', 'think', 'think_answer', 'think_response')
        'env --distributed' = @('ray')
        'env --stage-placement' = @('pack', 'spread', 'strict-pack', 'strict-spread')
        'env --usage-stats' = @('on', 'off', 'no-stack')
        'warmup --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'warmup --batching' = @('fused', 'inflight', 'static')
        'warmup --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'warmup --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'warmup --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'warmup --state-prefill' = @('recurrent', 'chunked')
        'warmup --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'exl2', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4')
        'warmup --load-format' = @('auto', 'stream', 'dummy')
        'warmup --rope-scaling' = @('linear', 'dynamic')
        'quantize --method' = @('gptq', 'awq', 'rtn', 'fp8', 'int8')
        'quantize --format' = @('gptq', 'gptq_v2', 'awq', 'compressed-tensors', 'gguf')
        'quantize --device' = @('cpu', 'cuda')
        'quantize --backend' = @('builtin', 'gptqmodel')
        'bench' = @('view', 'compare')
        'bench --route' = @('auto', 'tgi', 'completions', 'chat')
        'bench --ui' = @('auto', 'tui', 'plain', 'none')
        'bench view --ui' = @('auto', 'tui', 'plain', 'none')
        'model-server --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'model-server --batching' = @('fused', 'inflight', 'static')
        'model-server --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'model-server --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'model-server --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'model-server --state-prefill' = @('recurrent', 'chunked')
        'model-server --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'exl2', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4')
        'model-server --load-format' = @('auto', 'stream', 'dummy')
        'model-server --rope-scaling' = @('linear', 'dynamic')
        'router --generation-config' = @('auto', 'none')
        'router --tool-call-parser' = @('auto', 'none', 'apertus', 'cohere', 'deepseek', 'deepseek_v31', 'deepseek_v32', 'deepseek_v4', 'functionary', 'functiongemma', 'functools', 'gemma4', 'gigachat3', 'gigachat31', 'glm45', 'glm47', 'granite', 'granite_20b', 'harmony', 'hermes', 'hunyuan_v3', 'internlm', 'jamba', 'kimi_k2', 'kimi_k3', 'lfm2', 'llama3_json', 'longcat', 'longcat_v2', 'minicpm5', 'minimax', 'minimax_m2', 'mistral', 'mistral_list', 'nemotron', 'olmo3', 'phi4_mini', 'pythonic', 'qwen3_coder', 'seed_oss', 'solar', 'step3', 'xlam')
        'router --reasoning-parser' = @('auto', 'none', 'apertus', 'apriel', 'cohere', 'gemma4', 'granite', 'harmony', 'hunyuan_v3', 'kimi', 'kimi_k3', 'longcat', 'minimax_m3', 'mistral', 'seed_oss', 'solar', 'think', 'think_answer', 'think_response')
        'router --usage-stats' = @('on', 'off', 'no-stack')
        'connect' = @('codex', 'claude', 'opencode', 'qwen-code', 'aider', 'continue', 'zed', 'open-webui')
        'deploy' = @('docker', 'compose', 'systemd', 'k8s', 'ray', 'grafana', 'prometheus')
        'deploy --autoscale' = @('hpa', 'keda')
        'deploy --gateway' = @('inference-pool', 'smg')
        'deploy --dtype' = @('auto', 'float16', 'half', 'bfloat16', 'float32', 'float')
        'deploy --batching' = @('fused', 'inflight', 'static')
        'deploy --capacity-policy' = @('max_utilization', 'guaranteed_no_evict')
        'deploy --kv-cache-dtype' = @('auto', 'fp8_e4m3fn', 'fp8_e5m2')
        'deploy --attention' = @('auto', 'triton', 'flashinfer', 'native', 'cpu', 'torch', 'paged', 'flashdecoding')
        'deploy --state-prefill' = @('recurrent', 'chunked')
        'deploy --quantize' = @('gptq', 'awq', 'compressed-tensors', 'marlin', 'exl2', 'fp8', 'int8', 'eetq', 'bitsandbytes', 'bitsandbytes-nf4', 'bitsandbytes-fp4')
        'deploy --load-format' = @('auto', 'stream', 'dummy')
        'deploy --rope-scaling' = @('linear', 'dynamic')
        'deploy --generation-config' = @('auto', 'none')
        'deploy --tool-call-parser' = @('auto', 'none', 'apertus', 'cohere', 'deepseek', 'deepseek_v31', 'deepseek_v32', 'deepseek_v4', 'functionary', 'functiongemma', 'functools', 'gemma4', 'gigachat3', 'gigachat31', 'glm45', 'glm47', 'granite', 'granite_20b', 'harmony', 'hermes', 'hunyuan_v3', 'internlm', 'jamba', 'kimi_k2', 'kimi_k3', 'lfm2', 'llama3_json', 'longcat', 'longcat_v2', 'minicpm5', 'minimax', 'minimax_m2', 'mistral', 'mistral_list', 'nemotron', 'olmo3', 'phi4_mini', 'pythonic', 'qwen3_coder', 'seed_oss', 'solar', 'step3', 'xlam')
        'deploy --reasoning-parser' = @('auto', 'none', 'apertus', 'apriel', 'cohere', 'gemma4', 'granite', 'harmony', 'hunyuan_v3', 'kimi', 'kimi_k3', 'longcat', 'minimax_m3', 'mistral', 'seed_oss', 'solar', 'think', 'think_answer', 'think_response')
        'deploy --distributed' = @('ray')
        'deploy --stage-placement' = @('pack', 'spread', 'strict-pack', 'strict-spread')
        'deploy --usage-stats' = @('on', 'off', 'no-stack')
        'completion' = @('bash', 'zsh', 'fish', 'powershell')
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
