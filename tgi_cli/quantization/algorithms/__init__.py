"""Quantization algorithms (GPTQ, AWQ, rounding to nearest) and the layouts of their results."""
