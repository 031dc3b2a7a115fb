"""Logits to tokens. ``params`` says what is wanted (no torch); ``sampler`` does it."""
