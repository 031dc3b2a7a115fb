"""Text to tokens and back: tokenizer, chat templates, incremental detokenization, stop strings."""
