"""Makes quantized checkpoints: calibration, one block after the other, evaluation, model card.

The arithmetic and the layouts of files are ``quantization/``'s; what is here owns the order of
work: which block is in memory, what has been written, what can be resumed.
"""
