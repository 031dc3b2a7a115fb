"""Causal language models of transformers, run with our layers and paged attention."""
