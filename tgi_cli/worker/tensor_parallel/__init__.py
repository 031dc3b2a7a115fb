"""One model over several processes, after Megatron-LM (https://arxiv.org/abs/1909.08053)."""
