"""GGUF, the file format of llama.cpp: metadata, tensors and what they mean here. No torch.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A GGUF file is served from a folder like that of any checkpoint, with links to the file or to all of
its parts, under their own names, instead of safetensors:

    config.json             :func:`.model_config.model_config` of the headers, which names the
                            quantization method ``gguf``
    generation_config.json, tokenizer.json, tokenizer_config.json
    NAME.gguf               or NAME-00001-of-00003.gguf and so on

The loader reads the only ``*.gguf`` (or the parts) of the folder, and gives its tensors the names
that the architecture's checkpoints have elsewhere (:mod:`.weight_names`).
"""
