"""Logits to tokens: parameters (``params``, without torch) and the ``sampler``."""
