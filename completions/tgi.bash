# Completes tgi's commands and flags. Written by `make completions`.
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
            serve|env|download-weights|warmup|quantize|bench|model-server|router|connect|completion) command=${COMP_WORDS[i]}; break ;;
        esac
    done
    if ((i + 1 < COMP_CWORD)); then
        case "$command ${COMP_WORDS[i+1]}" in
'bench view'|'bench compare') command+=" ${COMP_WORDS[i+1]}" ;;
        esac
    fi
    case "$command $previous" in
        'serve --model-id') _tgi_names -d "$word"; return ;;
        'serve --revision') return ;;
        'serve --dtype') COMPREPLY=($(compgen -W 'auto float16 half bfloat16 float32 float' -- "$word")); return ;;
        'serve --config') _tgi_names -f "$word"; return ;;
        'serve --hostname') return ;;
        'serve --port'|'serve -p') return ;;
        'serve --graceful-termination-timeout'|'serve -g') return ;;
        'serve --api-key') return ;;
        'serve --cors-allow-origin') return ;;
        'serve --ssl-certfile') _tgi_names -f "$word"; return ;;
        'serve --ssl-keyfile') _tgi_names -f "$word"; return ;;
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
        'serve --state-prefill') COMPREPLY=($(compgen -W 'recurrent chunked' -- "$word")); return ;;
        'serve --speculate') return ;;
        'serve --speculative-model') _tgi_names -d "$word"; return ;;
        'serve --speculative-config') return ;;
        'serve --num-shard') return ;;
        'serve --cuda-memory-fraction') return ;;
        'serve --shard-uds-path') _tgi_names -f "$word"; return ;;
        'serve --quantize') COMPREPLY=($(compgen -W 'gptq awq compressed-tensors marlin exl2 fp8 int8 eetq bitsandbytes bitsandbytes-nf4 bitsandbytes-fp4' -- "$word")); return ;;
        'serve --quantize-head-bits') return ;;
        'serve --load-format') COMPREPLY=($(compgen -W 'auto dummy' -- "$word")); return ;;
        'serve --rope-scaling') COMPREPLY=($(compgen -W 'linear dynamic' -- "$word")); return ;;
        'serve --rope-factor') return ;;
        'serve --huggingface-hub-cache') _tgi_names -d "$word"; return ;;
        'serve --weights-cache-override') _tgi_names -d "$word"; return ;;
        'serve --lora-adapters') return ;;
        'serve --max-loras') return ;;
        'serve --max-cpu-loras') return ;;
        'serve --max-lora-rank') return ;;
        'serve --served-model-name') return ;;
        'serve --max-best-of') return ;;
        'serve --max-stop-sequences') return ;;
        'serve --max-top-n-tokens') return ;;
        'serve --max-client-batch-size') return ;;
        'serve --validation-workers') return ;;
        'serve --payload-limit') return ;;
        'serve --response-store-bytes') return ;;
        'serve --response-store-seconds') return ;;
        'serve --watermark-gamma') return ;;
        'serve --watermark-delta') return ;;
        'serve --generation-config') COMPREPLY=($(compgen -W 'auto none' -- "$word")); return ;;
        'serve --allowed-media-domains') return ;;
        'serve --allowed-local-media-path') _tgi_names -d "$word"; return ;;
        'serve --media-fetch-timeout') return ;;
        'serve --max-image-fetch-size') return ;;
        'serve --max-image-pixels') return ;;
        'serve --max-images') return ;;
        'serve --image-workers') return ;;
        'serve --chat-template') _tgi_names -f "$word"; return ;;
        'serve --tokenizer-config-path') _tgi_names -f "$word"; return ;;
        'serve --tool-call-parser') COMPREPLY=($(compgen -W 'auto none apertus cohere deepseek deepseek_v31 deepseek_v32 deepseek_v4 functionary functiongemma functools gemma4 gigachat3 gigachat31 glm45 glm47 granite granite_20b harmony hermes hunyuan_v3 internlm jamba kimi_k2 kimi_k3 lfm2 llama3_json longcat longcat_v2 minicpm5 minimax minimax_m2 mistral mistral_list nemotron olmo3 phi4_mini pythonic qwen3_coder seed_oss solar step3 xlam' -- "$word")); return ;;
        'serve --reasoning-parser') COMPREPLY=($(compgen -W 'auto none apertus apriel cohere gemma4 granite harmony hunyuan_v3 kimi kimi_k3 longcat minimax_m3 mistral seed_oss solar think think_answer think_response' -- "$word")); return ;;
        'serve --otlp-endpoint') return ;;
        'serve --otlp-service-name') return ;;
        'serve --logger-level') return ;;
        'serve --max-restarts') return ;;
        'serve --watchdog-timeout') return ;;
        'serve --prometheus-port') return ;;
        'serve --master-addr') return ;;
        'serve --master-port') return ;;
        'serve --usage-stats') COMPREPLY=($(compgen -W 'on off no-stack' -- "$word")); return ;;
        'serve --ngrok-authtoken') return ;;
        'serve --ngrok-edge') return ;;
        'env --model-id') _tgi_names -d "$word"; return ;;
        'env --revision') return ;;
        'env --dtype') COMPREPLY=($(compgen -W 'auto float16 half bfloat16 float32 float' -- "$word")); return ;;
        'env --config') _tgi_names -f "$word"; return ;;
        'env --hostname') return ;;
        'env --port'|'env -p') return ;;
        'env --graceful-termination-timeout'|'env -g') return ;;
        'env --api-key') return ;;
        'env --cors-allow-origin') return ;;
        'env --ssl-certfile') _tgi_names -f "$word"; return ;;
        'env --ssl-keyfile') _tgi_names -f "$word"; return ;;
        'env --max-concurrent-requests') return ;;
        'env --max-input-tokens') return ;;
        'env --max-input-length') return ;;
        'env --max-total-tokens') return ;;
        'env --max-batch-prefill-tokens') return ;;
        'env --max-batch-total-tokens') return ;;
        'env --max-batch-size') return ;;
        'env --max-queued-requests') return ;;
        'env --max-queued-tokens') return ;;
        'env --batching') COMPREPLY=($(compgen -W 'fused inflight static' -- "$word")); return ;;
        'env --capacity-policy') COMPREPLY=($(compgen -W 'max_utilization guaranteed_no_evict' -- "$word")); return ;;
        'env --waiting-served-ratio') return ;;
        'env --max-waiting-tokens') return ;;
        'env --kv-cache-dtype') COMPREPLY=($(compgen -W 'auto fp8_e4m3fn fp8_e5m2' -- "$word")); return ;;
        'env --attention') COMPREPLY=($(compgen -W 'auto triton flashinfer native cpu torch paged flashdecoding' -- "$word")); return ;;
        'env --cuda-graphs') return ;;
        'env --state-prefill') COMPREPLY=($(compgen -W 'recurrent chunked' -- "$word")); return ;;
        'env --speculate') return ;;
        'env --speculative-model') _tgi_names -d "$word"; return ;;
        'env --speculative-config') return ;;
        'env --num-shard') return ;;
        'env --cuda-memory-fraction') return ;;
        'env --shard-uds-path') _tgi_names -f "$word"; return ;;
        'env --quantize') COMPREPLY=($(compgen -W 'gptq awq compressed-tensors marlin exl2 fp8 int8 eetq bitsandbytes bitsandbytes-nf4 bitsandbytes-fp4' -- "$word")); return ;;
        'env --quantize-head-bits') return ;;
        'env --load-format') COMPREPLY=($(compgen -W 'auto dummy' -- "$word")); return ;;
        'env --rope-scaling') COMPREPLY=($(compgen -W 'linear dynamic' -- "$word")); return ;;
        'env --rope-factor') return ;;
        'env --huggingface-hub-cache') _tgi_names -d "$word"; return ;;
        'env --weights-cache-override') _tgi_names -d "$word"; return ;;
        'env --lora-adapters') return ;;
        'env --max-loras') return ;;
        'env --max-cpu-loras') return ;;
        'env --max-lora-rank') return ;;
        'env --served-model-name') return ;;
        'env --max-best-of') return ;;
        'env --max-stop-sequences') return ;;
        'env --max-top-n-tokens') return ;;
        'env --max-client-batch-size') return ;;
        'env --validation-workers') return ;;
        'env --payload-limit') return ;;
        'env --response-store-bytes') return ;;
        'env --response-store-seconds') return ;;
        'env --watermark-gamma') return ;;
        'env --watermark-delta') return ;;
        'env --generation-config') COMPREPLY=($(compgen -W 'auto none' -- "$word")); return ;;
        'env --allowed-media-domains') return ;;
        'env --allowed-local-media-path') _tgi_names -d "$word"; return ;;
        'env --media-fetch-timeout') return ;;
        'env --max-image-fetch-size') return ;;
        'env --max-image-pixels') return ;;
        'env --max-images') return ;;
        'env --image-workers') return ;;
        'env --chat-template') _tgi_names -f "$word"; return ;;
        'env --tokenizer-config-path') _tgi_names -f "$word"; return ;;
        'env --tool-call-parser') COMPREPLY=($(compgen -W 'auto none apertus cohere deepseek deepseek_v31 deepseek_v32 deepseek_v4 functionary functiongemma functools gemma4 gigachat3 gigachat31 glm45 glm47 granite granite_20b harmony hermes hunyuan_v3 internlm jamba kimi_k2 kimi_k3 lfm2 llama3_json longcat longcat_v2 minicpm5 minimax minimax_m2 mistral mistral_list nemotron olmo3 phi4_mini pythonic qwen3_coder seed_oss solar step3 xlam' -- "$word")); return ;;
        'env --reasoning-parser') COMPREPLY=($(compgen -W 'auto none apertus apriel cohere gemma4 granite harmony hunyuan_v3 kimi kimi_k3 longcat minimax_m3 mistral seed_oss solar think think_answer think_response' -- "$word")); return ;;
        'env --otlp-endpoint') return ;;
        'env --otlp-service-name') return ;;
        'env --logger-level') return ;;
        'env --max-restarts') return ;;
        'env --watchdog-timeout') return ;;
        'env --prometheus-port') return ;;
        'env --master-addr') return ;;
        'env --master-port') return ;;
        'env --usage-stats') COMPREPLY=($(compgen -W 'on off no-stack' -- "$word")); return ;;
        'env --ngrok-authtoken') return ;;
        'env --ngrok-edge') return ;;
        'download-weights --model-id') _tgi_names -d "$word"; return ;;
        'download-weights --revision') return ;;
        'download-weights --config') _tgi_names -f "$word"; return ;;
        'download-weights --huggingface-hub-cache') _tgi_names -d "$word"; return ;;
        'download-weights --extension') return ;;
        'download-weights --logger-level') return ;;
        'warmup --model-id') _tgi_names -d "$word"; return ;;
        'warmup --revision') return ;;
        'warmup --dtype') COMPREPLY=($(compgen -W 'auto float16 half bfloat16 float32 float' -- "$word")); return ;;
        'warmup --config') _tgi_names -f "$word"; return ;;
        'warmup --api-key') return ;;
        'warmup --max-concurrent-requests') return ;;
        'warmup --max-input-tokens') return ;;
        'warmup --max-input-length') return ;;
        'warmup --max-total-tokens') return ;;
        'warmup --max-batch-prefill-tokens') return ;;
        'warmup --max-batch-total-tokens') return ;;
        'warmup --max-batch-size') return ;;
        'warmup --max-queued-requests') return ;;
        'warmup --max-queued-tokens') return ;;
        'warmup --batching') COMPREPLY=($(compgen -W 'fused inflight static' -- "$word")); return ;;
        'warmup --capacity-policy') COMPREPLY=($(compgen -W 'max_utilization guaranteed_no_evict' -- "$word")); return ;;
        'warmup --waiting-served-ratio') return ;;
        'warmup --max-waiting-tokens') return ;;
        'warmup --kv-cache-dtype') COMPREPLY=($(compgen -W 'auto fp8_e4m3fn fp8_e5m2' -- "$word")); return ;;
        'warmup --attention') COMPREPLY=($(compgen -W 'auto triton flashinfer native cpu torch paged flashdecoding' -- "$word")); return ;;
        'warmup --cuda-graphs') return ;;
        'warmup --state-prefill') COMPREPLY=($(compgen -W 'recurrent chunked' -- "$word")); return ;;
        'warmup --speculate') return ;;
        'warmup --speculative-model') _tgi_names -d "$word"; return ;;
        'warmup --speculative-config') return ;;
        'warmup --num-shard') return ;;
        'warmup --cuda-memory-fraction') return ;;
        'warmup --quantize') COMPREPLY=($(compgen -W 'gptq awq compressed-tensors marlin exl2 fp8 int8 eetq bitsandbytes bitsandbytes-nf4 bitsandbytes-fp4' -- "$word")); return ;;
        'warmup --quantize-head-bits') return ;;
        'warmup --load-format') COMPREPLY=($(compgen -W 'auto dummy' -- "$word")); return ;;
        'warmup --rope-scaling') COMPREPLY=($(compgen -W 'linear dynamic' -- "$word")); return ;;
        'warmup --rope-factor') return ;;
        'warmup --huggingface-hub-cache') _tgi_names -d "$word"; return ;;
        'warmup --weights-cache-override') _tgi_names -d "$word"; return ;;
        'warmup --url') return ;;
        'warmup --batch-sizes') return ;;
        'warmup --lora-adapters') return ;;
        'warmup --max-loras') return ;;
        'warmup --max-cpu-loras') return ;;
        'warmup --max-lora-rank') return ;;
        'warmup --logger-level') return ;;
        'quantize --revision') return ;;
        'quantize --config') _tgi_names -f "$word"; return ;;
        'quantize --logger-level') return ;;
        'quantize --upload-to-model-id') return ;;
        'quantize --method') COMPREPLY=($(compgen -W 'gptq awq rtn fp8 int8' -- "$word")); return ;;
        'quantize --bits') return ;;
        'quantize --groupsize') return ;;
        'quantize --percdamp') return ;;
        'quantize --format') COMPREPLY=($(compgen -W 'gptq gptq_v2 awq compressed-tensors' -- "$word")); return ;;
        'quantize --calibration') _tgi_names -f "$word"; return ;;
        'quantize --samples') return ;;
        'quantize --seq-len') return ;;
        'quantize --seed') return ;;
        'quantize --include') return ;;
        'quantize --exclude') return ;;
        'quantize --device') COMPREPLY=($(compgen -W 'cpu cuda' -- "$word")); return ;;
        'quantize --backend') COMPREPLY=($(compgen -W 'builtin gptqmodel' -- "$word")); return ;;
        'bench --revision') return ;;
        'bench --config') _tgi_names -f "$word"; return ;;
        'bench --tokenizer-name'|'bench -t') _tgi_names -d "$word"; return ;;
        'bench --master-shard-uds-path'|'bench -m') _tgi_names -f "$word"; return ;;
        'bench --url') return ;;
        'bench --api-key') return ;;
        'bench --header'|'bench -H') return ;;
        'bench --route') COMPREPLY=($(compgen -W 'auto tgi completions chat' -- "$word")); return ;;
        'bench --serve-args') return ;;
        'bench --timeout') return ;;
        'bench --batch-size'|'bench -b') return ;;
        'bench --sequence-length'|'bench -s') return ;;
        'bench --decode-length'|'bench -d') return ;;
        'bench --runs'|'bench -r') return ;;
        'bench --concurrency'|'bench -c') return ;;
        'bench --rate') return ;;
        'bench --ramp') return ;;
        'bench --trace') _tgi_names -f "$word"; return ;;
        'bench --slo') return ;;
        'bench --slo-share') return ;;
        'bench --arrival') return ;;
        'bench --speed') return ;;
        'bench --duration') return ;;
        'bench --requests'|'bench -n') return ;;
        'bench --warmups'|'bench -w') return ;;
        'bench --input-tokens') return ;;
        'bench --output-tokens') return ;;
        'bench --prefix') return ;;
        'bench --prompts') _tgi_names -f "$word"; return ;;
        'bench --conversations') return ;;
        'bench --think') return ;;
        'bench --extra-body') return ;;
        'bench --seed') return ;;
        'bench --temperature') return ;;
        'bench --top-k') return ;;
        'bench --top-p') return ;;
        'bench --typical-p') return ;;
        'bench --repetition-penalty') return ;;
        'bench --frequency-penalty') return ;;
        'bench --top-n-tokens') return ;;
        'bench --output'|'bench -o') _tgi_names -f "$word"; return ;;
        'bench --csv') _tgi_names -f "$word"; return ;;
        'bench --jsonl') _tgi_names -f "$word"; return ;;
        'bench --html') _tgi_names -f "$word"; return ;;
        'bench --markdown') _tgi_names -f "$word"; return ;;
        'bench --svg') _tgi_names -f "$word"; return ;;
        'bench --ui') COMPREPLY=($(compgen -W 'auto tui plain none' -- "$word")); return ;;
        'bench view --csv') _tgi_names -f "$word"; return ;;
        'bench view --html') _tgi_names -f "$word"; return ;;
        'bench view --markdown') _tgi_names -f "$word"; return ;;
        'bench view --svg') _tgi_names -f "$word"; return ;;
        'bench view --ui') COMPREPLY=($(compgen -W 'auto tui plain none' -- "$word")); return ;;
        'bench compare --markdown') _tgi_names -f "$word"; return ;;
        'bench compare --fail-on') return ;;
        'model-server --model-id') _tgi_names -d "$word"; return ;;
        'model-server --revision') return ;;
        'model-server --dtype') COMPREPLY=($(compgen -W 'auto float16 half bfloat16 float32 float' -- "$word")); return ;;
        'model-server --config') _tgi_names -f "$word"; return ;;
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
        'model-server --state-prefill') COMPREPLY=($(compgen -W 'recurrent chunked' -- "$word")); return ;;
        'model-server --speculate') return ;;
        'model-server --speculative-model') _tgi_names -d "$word"; return ;;
        'model-server --speculative-config') return ;;
        'model-server --num-shard') return ;;
        'model-server --cuda-memory-fraction') return ;;
        'model-server --uds-path') _tgi_names -f "$word"; return ;;
        'model-server --shard-uds-path') _tgi_names -f "$word"; return ;;
        'model-server --quantize') COMPREPLY=($(compgen -W 'gptq awq compressed-tensors marlin exl2 fp8 int8 eetq bitsandbytes bitsandbytes-nf4 bitsandbytes-fp4' -- "$word")); return ;;
        'model-server --quantize-head-bits') return ;;
        'model-server --load-format') COMPREPLY=($(compgen -W 'auto dummy' -- "$word")); return ;;
        'model-server --rope-scaling') COMPREPLY=($(compgen -W 'linear dynamic' -- "$word")); return ;;
        'model-server --rope-factor') return ;;
        'model-server --huggingface-hub-cache') _tgi_names -d "$word"; return ;;
        'model-server --weights-cache-override') _tgi_names -d "$word"; return ;;
        'model-server --lora-adapters') return ;;
        'model-server --max-loras') return ;;
        'model-server --max-cpu-loras') return ;;
        'model-server --max-lora-rank') return ;;
        'model-server --watermark-gamma') return ;;
        'model-server --watermark-delta') return ;;
        'model-server --otlp-endpoint') return ;;
        'model-server --otlp-service-name') return ;;
        'model-server --logger-level') return ;;
        'model-server --engine-listen') return ;;
        'model-server --engine-tls-cert') _tgi_names -f "$word"; return ;;
        'model-server --engine-tls-key') _tgi_names -f "$word"; return ;;
        'model-server --engine-tls-client-ca') _tgi_names -f "$word"; return ;;
        'model-server --master-addr') return ;;
        'model-server --master-port') return ;;
        'router --model-id') _tgi_names -d "$word"; return ;;
        'router --tokenizer-name') _tgi_names -d "$word"; return ;;
        'router --revision') return ;;
        'router --config') _tgi_names -f "$word"; return ;;
        'router --hostname') return ;;
        'router --port'|'router -p') return ;;
        'router --graceful-termination-timeout'|'router -g') return ;;
        'router --api-key') return ;;
        'router --cors-allow-origin') return ;;
        'router --ssl-certfile') _tgi_names -f "$word"; return ;;
        'router --ssl-keyfile') _tgi_names -f "$word"; return ;;
        'router --max-concurrent-requests') return ;;
        'router --max-input-tokens') return ;;
        'router --max-input-length') return ;;
        'router --max-total-tokens') return ;;
        'router --max-batch-prefill-tokens') return ;;
        'router --max-batch-total-tokens') return ;;
        'router --max-batch-size') return ;;
        'router --waiting-served-ratio') return ;;
        'router --max-waiting-tokens') return ;;
        'router --huggingface-hub-cache') _tgi_names -d "$word"; return ;;
        'router --served-model-name') return ;;
        'router --max-best-of') return ;;
        'router --max-stop-sequences') return ;;
        'router --max-top-n-tokens') return ;;
        'router --max-client-batch-size') return ;;
        'router --validation-workers') return ;;
        'router --payload-limit') return ;;
        'router --response-store-bytes') return ;;
        'router --response-store-seconds') return ;;
        'router --watermark-gamma') return ;;
        'router --watermark-delta') return ;;
        'router --generation-config') COMPREPLY=($(compgen -W 'auto none' -- "$word")); return ;;
        'router --allowed-media-domains') return ;;
        'router --allowed-local-media-path') _tgi_names -d "$word"; return ;;
        'router --media-fetch-timeout') return ;;
        'router --max-image-fetch-size') return ;;
        'router --max-image-pixels') return ;;
        'router --max-images') return ;;
        'router --image-workers') return ;;
        'router --chat-template') _tgi_names -f "$word"; return ;;
        'router --tokenizer-config-path') _tgi_names -f "$word"; return ;;
        'router --tool-call-parser') COMPREPLY=($(compgen -W 'auto none apertus cohere deepseek deepseek_v31 deepseek_v32 deepseek_v4 functionary functiongemma functools gemma4 gigachat3 gigachat31 glm45 glm47 granite granite_20b harmony hermes hunyuan_v3 internlm jamba kimi_k2 kimi_k3 lfm2 llama3_json longcat longcat_v2 minicpm5 minimax minimax_m2 mistral mistral_list nemotron olmo3 phi4_mini pythonic qwen3_coder seed_oss solar step3 xlam' -- "$word")); return ;;
        'router --reasoning-parser') COMPREPLY=($(compgen -W 'auto none apertus apriel cohere gemma4 granite harmony hunyuan_v3 kimi kimi_k3 longcat minimax_m3 mistral seed_oss solar think think_answer think_response' -- "$word")); return ;;
        'router --otlp-endpoint') return ;;
        'router --otlp-service-name') return ;;
        'router --logger-level') return ;;
        'router --engine-url') return ;;
        'router --master-shard-uds-path') _tgi_names -f "$word"; return ;;
        'router --engine-tls-cert') _tgi_names -f "$word"; return ;;
        'router --engine-tls-key') _tgi_names -f "$word"; return ;;
        'router --engine-tls-ca') _tgi_names -f "$word"; return ;;
        'router --engine-tls-server-name') return ;;
        'router --watchdog-timeout') return ;;
        'router --prometheus-port') return ;;
        'router --usage-stats') COMPREPLY=($(compgen -W 'on off no-stack' -- "$word")); return ;;
        'router --ngrok-authtoken') return ;;
        'router --ngrok-edge') return ;;
        'connect --model') return ;;
        'connect --api-key-env') return ;;
        'connect --api-key') return ;;
        'connect --file') _tgi_names -f "$word"; return ;;
    esac
    case $command in
        'serve') flags='--model-id --revision --dtype --trust-remote-code --no-trust-remote-code --config --hostname --port -p --graceful-termination-timeout -g --api-key --cors-allow-origin --ssl-certfile --ssl-keyfile --max-concurrent-requests --max-input-tokens --max-input-length --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens --max-batch-size --max-queued-requests --max-queued-tokens --disable-grammar-support --batching --capacity-policy --waiting-served-ratio --max-waiting-tokens --prefix-caching --no-prefix-caching --kv-cache-dtype --attention --cuda-graphs --state-prefill --measured-limits --no-measured-limits --speculate --speculative-model --speculative-config --sharded --no-sharded --num-shard --cuda-memory-fraction --shard-uds-path --quantize --quantize-head --quantize-head-bits --quantize-activations --load-format --cross-check --rope-scaling --rope-factor --disable-custom-kernels --huggingface-hub-cache --weights-cache-override --lora-adapters --max-loras --max-cpu-loras --max-lora-rank --served-model-name --max-best-of --max-stop-sequences --max-top-n-tokens --max-client-batch-size --validation-workers --payload-limit --response-store-bytes --response-store-seconds --watermark-gamma --watermark-delta --generation-config --media-fetch --allowed-media-domains --allow-private-media --allowed-local-media-path --media-fetch-timeout --max-image-fetch-size --max-image-pixels --max-images --image-workers --chat-template --tokenizer-config-path --tool-call-parser --reasoning-parser --otlp-endpoint --otlp-service-name --vllm-metrics --logger-level --json-output --no-json-output --env -e --max-restarts --watchdog-timeout --prometheus-port --master-addr --master-port --usage-stats --enable-prefill-logprobs --ngrok --ngrok-authtoken --ngrok-edge --help -h --help-all'
            _tgi_names -d "$word" ;;
        'env') flags='--model-id --revision --dtype --trust-remote-code --no-trust-remote-code --config --hostname --port -p --graceful-termination-timeout -g --api-key --cors-allow-origin --ssl-certfile --ssl-keyfile --max-concurrent-requests --max-input-tokens --max-input-length --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens --max-batch-size --max-queued-requests --max-queued-tokens --disable-grammar-support --batching --capacity-policy --waiting-served-ratio --max-waiting-tokens --prefix-caching --no-prefix-caching --kv-cache-dtype --attention --cuda-graphs --state-prefill --measured-limits --no-measured-limits --speculate --speculative-model --speculative-config --sharded --no-sharded --num-shard --cuda-memory-fraction --shard-uds-path --quantize --quantize-head --quantize-head-bits --quantize-activations --load-format --cross-check --rope-scaling --rope-factor --disable-custom-kernels --huggingface-hub-cache --weights-cache-override --lora-adapters --max-loras --max-cpu-loras --max-lora-rank --served-model-name --max-best-of --max-stop-sequences --max-top-n-tokens --max-client-batch-size --validation-workers --payload-limit --response-store-bytes --response-store-seconds --watermark-gamma --watermark-delta --generation-config --media-fetch --allowed-media-domains --allow-private-media --allowed-local-media-path --media-fetch-timeout --max-image-fetch-size --max-image-pixels --max-images --image-workers --chat-template --tokenizer-config-path --tool-call-parser --reasoning-parser --otlp-endpoint --otlp-service-name --vllm-metrics --logger-level --json-output --no-json-output --env -e --max-restarts --watchdog-timeout --prometheus-port --master-addr --master-port --usage-stats --enable-prefill-logprobs --ngrok --ngrok-authtoken --ngrok-edge --help -h --help-all'
            _tgi_names -d "$word" ;;
        'download-weights') flags='--model-id --revision --trust-remote-code --no-trust-remote-code --config --huggingface-hub-cache --extension --auto-convert --no-auto-convert --merge-lora --no-merge-lora --quiet --logger-level --json-output --no-json-output --help -h --help-all'
            _tgi_names -d "$word" ;;
        'warmup') flags='--model-id --revision --dtype --trust-remote-code --no-trust-remote-code --config --api-key --max-concurrent-requests --max-input-tokens --max-input-length --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens --max-batch-size --max-queued-requests --max-queued-tokens --disable-grammar-support --batching --capacity-policy --waiting-served-ratio --max-waiting-tokens --prefix-caching --no-prefix-caching --kv-cache-dtype --attention --cuda-graphs --state-prefill --speculate --speculative-model --speculative-config --sharded --no-sharded --num-shard --cuda-memory-fraction --quantize --quantize-head --quantize-head-bits --quantize-activations --load-format --cross-check --rope-scaling --rope-factor --disable-custom-kernels --huggingface-hub-cache --weights-cache-override --url --batch-sizes --lora-adapters --max-loras --max-cpu-loras --max-lora-rank --logger-level --json-output --no-json-output --help -h --help-all'
            _tgi_names -d "$word" ;;
        'quantize') flags='--revision --trust-remote-code --no-trust-remote-code --config --logger-level --json-output --no-json-output --inspect --upload-to-model-id --method --bits --groupsize --sym --asym --act-order --no-act-order --static-groups --group-aware --no-group-aware --mse --percdamp --format --calibration --samples --seq-len --seed --include --exclude --evaluate --resume --device --backend --help -h --help-all'
            _tgi_names -d "$word" ;;
        'bench') flags='--revision --config --tokenizer-name -t --master-shard-uds-path -m --url --api-key --header -H --route --serve-args --timeout --batch-size -b --sequence-length -s --decode-length -d --runs -r --concurrency -c --rate --ramp --sweep --trace --slo --slo-share --arrival --speed --duration --requests -n --warmups -w --input-tokens --output-tokens --prefix --prompts --conversations --think --ignore-eos --no-ignore-eos --extra-body --seed --temperature --top-k --top-p --typical-p --repetition-penalty --frequency-penalty --top-n-tokens --watermark --do-sample --output -o --csv --jsonl --html --markdown --svg --ui --help -h --help-all'
            COMPREPLY=($(compgen -W 'view compare' -- "$word"))
            _tgi_names -d "$word" ;;
        'bench view') flags='--csv --html --markdown --svg --ui --help -h --help-all'
            _tgi_names -f "$word" ;;
        'bench compare') flags='--markdown --fail-on --help -h --help-all'
            _tgi_names -f "$word" ;;
        'model-server') flags='--model-id --revision --dtype --trust-remote-code --no-trust-remote-code --config --graceful-termination-timeout -g --max-concurrent-requests --max-input-tokens --max-input-length --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens --max-batch-size --max-queued-requests --max-queued-tokens --disable-grammar-support --batching --capacity-policy --waiting-served-ratio --max-waiting-tokens --prefix-caching --no-prefix-caching --kv-cache-dtype --attention --cuda-graphs --state-prefill --measured-limits --no-measured-limits --speculate --speculative-model --speculative-config --sharded --no-sharded --num-shard --cuda-memory-fraction --uds-path --shard-uds-path --quantize --quantize-head --quantize-head-bits --quantize-activations --load-format --cross-check --rope-scaling --rope-factor --disable-custom-kernels --huggingface-hub-cache --weights-cache-override --lora-adapters --max-loras --max-cpu-loras --max-lora-rank --watermark-gamma --watermark-delta --otlp-endpoint --otlp-service-name --logger-level --json-output --no-json-output --engine-listen --insecure-tcp --engine-tls-cert --engine-tls-key --engine-tls-client-ca --master-addr --master-port --help -h --help-all'
            _tgi_names -d "$word" ;;
        'router') flags='--model-id --tokenizer-name --revision --trust-remote-code --no-trust-remote-code --config --hostname --port -p --graceful-termination-timeout -g --api-key --cors-allow-origin --ssl-certfile --ssl-keyfile --max-concurrent-requests --max-input-tokens --max-input-length --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens --max-batch-size --disable-grammar-support --waiting-served-ratio --max-waiting-tokens --huggingface-hub-cache --served-model-name --max-best-of --max-stop-sequences --max-top-n-tokens --max-client-batch-size --validation-workers --payload-limit --response-store-bytes --response-store-seconds --watermark-gamma --watermark-delta --generation-config --media-fetch --allowed-media-domains --allow-private-media --allowed-local-media-path --media-fetch-timeout --max-image-fetch-size --max-image-pixels --max-images --image-workers --chat-template --tokenizer-config-path --tool-call-parser --reasoning-parser --otlp-endpoint --otlp-service-name --vllm-metrics --logger-level --json-output --no-json-output --engine-url --master-shard-uds-path --engine-tls-cert --engine-tls-key --engine-tls-ca --engine-tls-server-name --watchdog-timeout --prometheus-port --usage-stats --enable-prefill-logprobs --ngrok --ngrok-authtoken --ngrok-edge --help -h --help-all'
            _tgi_names -d "$word" ;;
        'connect') flags='--model --api-key-env --api-key --write --file --help -h --help-all'
            COMPREPLY=($(compgen -W 'codex claude opencode qwen-code continue zed open-webui' -- "$word")) ;;
        'completion') flags='--help -h --help-all'
            COMPREPLY=($(compgen -W 'bash zsh fish powershell' -- "$word")) ;;
        *) flags='--version -V --traceback --help -h'
            COMPREPLY=($(compgen -W 'serve env download-weights warmup quantize bench model-server router connect completion' -- "$word")) ;;
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    fi
}
complete -o filenames -F _tgi tgi
