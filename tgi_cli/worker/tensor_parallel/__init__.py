"""One model over several processes: shards of its matrices, after Megatron-LM
(https://arxiv.org/abs/1909.08053), and stages of its layers (https://arxiv.org/abs/1811.06965)."""
