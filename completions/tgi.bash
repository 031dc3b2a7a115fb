# Completes tgi's commands and flags. Written by `make completions`.
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
            serve|download-weights|warmup|model-server|router|completion) command=${COMP_WORDS[i]}; break ;;
        esac
    done
    case "$command $previous" in
        'serve --model-id') return ;;
        'serve --revision') return ;;
        'serve --dtype') COMPREPLY=($(compgen -W 'auto float16 half bfloat16 float32 float' -- "$word")); return ;;
        'serve --quantize') COMPREPLY=($(compgen -W 'gptq awq compressed-tensors marlin fp8 int8 eetq bitsandbytes bitsandbytes-nf4 bitsandbytes-fp4 exl2' -- "$word")); return ;;
        'serve --hostname') return ;;
        'serve --port'|'serve -p') return ;;
        'serve --graceful-termination-timeout'|'serve -g') return ;;
        'serve --max-concurrent-requests') return ;;
        'serve --max-input-tokens') return ;;
        'serve --max-input-length') return ;;
        'serve --max-total-tokens') return ;;
        'serve --max-batch-prefill-tokens') return ;;
        'serve --max-batch-total-tokens') return ;;
        'serve --max-batch-size') return ;;
        'serve --max-queued-requests') return ;;
        'serve --max-queued-tokens') return ;;
        'serve --batching') COMPREPLY=($(compgen -W 'fused inflight static' -- "$word")); return ;;
        'serve --capacity-policy') COMPREPLY=($(compgen -W 'max_utilization guaranteed_no_evict' -- "$word")); return ;;
        'serve --waiting-served-ratio') return ;;
        'serve --max-waiting-tokens') return ;;
        'serve --kv-cache-dtype') COMPREPLY=($(compgen -W 'auto fp8_e4m3fn fp8_e5m2' -- "$word")); return ;;
        'serve --attention') COMPREPLY=($(compgen -W 'auto triton flashinfer native cpu torch paged flashdecoding' -- "$word")); return ;;
        'serve --cuda-graphs') return ;;
        'serve --load-format') COMPREPLY=($(compgen -W 'auto dummy' -- "$word")); return ;;
        'serve --num-shard') return ;;
        'serve --lora-adapters') return ;;
        'serve --max-loras') return ;;
        'serve --max-cpu-loras') return ;;
        'serve --max-lora-rank') return ;;
        'serve --max-best-of') return ;;
        'serve --max-stop-sequences') return ;;
        'serve --max-top-n-tokens') return ;;
        'serve --max-client-batch-size') return ;;
        'serve --validation-workers') return ;;
        'serve --payload-limit') return ;;
        'serve --watermark-gamma') return ;;
        'serve --watermark-delta') return ;;
        'serve --generation-config') COMPREPLY=($(compgen -W 'auto none' -- "$word")); return ;;
        'serve --tokenizer-config-path') COMPREPLY=($(compgen -f -- "$word")); return ;;
        'serve --tool-call-parser') COMPREPLY=($(compgen -W 'auto none deepseek glm45 harmony hermes llama3_json mistral mistral_list qwen3_coder' -- "$word")); return ;;
        'serve --reasoning-parser') COMPREPLY=($(compgen -W 'auto none harmony mistral seed_oss think' -- "$word")); return ;;
        'serve --api-key') return ;;
        'serve --cors-allow-origin') return ;;
        'serve --ssl-certfile') COMPREPLY=($(compgen -f -- "$word")); return ;;
        'serve --ssl-keyfile') COMPREPLY=($(compgen -f -- "$word")); return ;;
        'serve --otlp-endpoint') return ;;
        'serve --otlp-service-name') return ;;
        'serve --logger-level') return ;;
        'download-weights --revision') return ;;
        'download-weights --extension') return ;;
        'download-weights --logger-level') return ;;
        'model-server --model-id') return ;;
        'model-server --revision') return ;;
        'model-server --dtype') COMPREPLY=($(compgen -W 'auto float16 half bfloat16 float32 float' -- "$word")); return ;;
        'model-server --quantize') COMPREPLY=($(compgen -W 'gptq awq compressed-tensors marlin fp8 int8 eetq bitsandbytes bitsandbytes-nf4 bitsandbytes-fp4 exl2' -- "$word")); return ;;
        'model-server --uds-path') COMPREPLY=($(compgen -f -- "$word")); return ;;
        'model-server --graceful-termination-timeout'|'model-server -g') return ;;
        'model-server --max-concurrent-requests') return ;;
        'model-server --max-input-tokens') return ;;
        'model-server --max-input-length') return ;;
        'model-server --max-total-tokens') return ;;
        'model-server --max-batch-prefill-tokens') return ;;
        'model-server --max-batch-total-tokens') return ;;
        'model-server --max-batch-size') return ;;
        'model-server --max-queued-requests') return ;;
        'model-server --max-queued-tokens') return ;;
        'model-server --batching') COMPREPLY=($(compgen -W 'fused inflight static' -- "$word")); return ;;
        'model-server --capacity-policy') COMPREPLY=($(compgen -W 'max_utilization guaranteed_no_evict' -- "$word")); return ;;
        'model-server --waiting-served-ratio') return ;;
        'model-server --max-waiting-tokens') return ;;
        'model-server --kv-cache-dtype') COMPREPLY=($(compgen -W 'auto fp8_e4m3fn fp8_e5m2' -- "$word")); return ;;
        'model-server --attention') COMPREPLY=($(compgen -W 'auto triton flashinfer native cpu torch paged flashdecoding' -- "$word")); return ;;
        'model-server --cuda-graphs') return ;;
        'model-server --load-format') COMPREPLY=($(compgen -W 'auto dummy' -- "$word")); return ;;
        'model-server --num-shard') return ;;
        'model-server --lora-adapters') return ;;
        'model-server --max-loras') return ;;
        'model-server --max-cpu-loras') return ;;
        'model-server --max-lora-rank') return ;;
        'model-server --logger-level') return ;;
        'router --model-id') return ;;
        'router --revision') return ;;
        'router --engine-url') return ;;
        'router --hostname') return ;;
        'router --port'|'router -p') return ;;
        'router --graceful-termination-timeout'|'router -g') return ;;
        'router --max-concurrent-requests') return ;;
        'router --max-best-of') return ;;
        'router --max-stop-sequences') return ;;
        'router --max-top-n-tokens') return ;;
        'router --max-client-batch-size') return ;;
        'router --validation-workers') return ;;
        'router --payload-limit') return ;;
        'router --watermark-gamma') return ;;
        'router --watermark-delta') return ;;
        'router --generation-config') COMPREPLY=($(compgen -W 'auto none' -- "$word")); return ;;
        'router --tokenizer-config-path') COMPREPLY=($(compgen -f -- "$word")); return ;;
        'router --tool-call-parser') COMPREPLY=($(compgen -W 'auto none deepseek glm45 harmony hermes llama3_json mistral mistral_list qwen3_coder' -- "$word")); return ;;
        'router --reasoning-parser') COMPREPLY=($(compgen -W 'auto none harmony mistral seed_oss think' -- "$word")); return ;;
        'router --api-key') return ;;
        'router --cors-allow-origin') return ;;
        'router --ssl-certfile') COMPREPLY=($(compgen -f -- "$word")); return ;;
        'router --ssl-keyfile') COMPREPLY=($(compgen -f -- "$word")); return ;;
        'router --otlp-endpoint') return ;;
        'router --otlp-service-name') return ;;
        'router --logger-level') return ;;
    esac
    case $command in
        serve) flags='--model-id --revision --dtype --quantize --trust-remote-code --hostname --port -p --graceful-termination-timeout -g --max-concurrent-requests --max-input-tokens --max-input-length --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens --max-batch-size --max-queued-requests --max-queued-tokens --batching --capacity-policy --waiting-served-ratio --max-waiting-tokens --prefix-caching --no-prefix-caching --disable-grammar-support --kv-cache-dtype --attention --cuda-graphs --load-format --cross-check --sharded --no-sharded --num-shard --lora-adapters --max-loras --max-cpu-loras --max-lora-rank --max-best-of --max-stop-sequences --max-top-n-tokens --max-client-batch-size --validation-workers --payload-limit --watermark-gamma --watermark-delta --generation-config --tokenizer-config-path --tool-call-parser --reasoning-parser --api-key --cors-allow-origin --ssl-certfile --ssl-keyfile --otlp-endpoint --otlp-service-name --vllm-metrics --logger-level --json-output -h --help'; COMPREPLY=($(compgen -d -- "$word")) ;;
        download-weights) flags='--revision --extension --auto-convert --no-auto-convert --merge-lora --no-merge-lora --trust-remote-code --no-trust-remote-code --logger-level --json-output --no-json-output --quiet -h --help'; COMPREPLY=($(compgen -d -- "$word")) ;;
        warmup) flags='--json-output -h --help'; COMPREPLY=() ;;
        model-server) flags='--model-id --revision --dtype --quantize --trust-remote-code --uds-path --graceful-termination-timeout -g --max-concurrent-requests --max-input-tokens --max-input-length --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens --max-batch-size --max-queued-requests --max-queued-tokens --batching --capacity-policy --waiting-served-ratio --max-waiting-tokens --prefix-caching --no-prefix-caching --disable-grammar-support --kv-cache-dtype --attention --cuda-graphs --load-format --cross-check --sharded --no-sharded --num-shard --lora-adapters --max-loras --max-cpu-loras --max-lora-rank --logger-level --json-output -h --help'; COMPREPLY=($(compgen -d -- "$word")) ;;
        router) flags='--model-id --revision --trust-remote-code --engine-url --hostname --port -p --graceful-termination-timeout -g --max-concurrent-requests --max-best-of --max-stop-sequences --max-top-n-tokens --max-client-batch-size --validation-workers --payload-limit --watermark-gamma --watermark-delta --generation-config --disable-grammar-support --tokenizer-config-path --tool-call-parser --reasoning-parser --api-key --cors-allow-origin --ssl-certfile --ssl-keyfile --otlp-endpoint --otlp-service-name --vllm-metrics --logger-level --json-output -h --help'; COMPREPLY=($(compgen -d -- "$word")) ;;
        completion) flags='-h --help'; COMPREPLY=($(compgen -W 'bash zsh fish powershell' -- "$word")) ;;
        *) flags='--version -V --traceback -h --help'
            COMPREPLY=($(compgen -W 'serve download-weights warmup model-server router completion' -- "$word")) ;;
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    fi
}
complete -o filenames -F _tgi tgi
