"""Causal language models of transformers, run with our layers and paged attention."""

# Operators for the meta device, on which models are built and tried: processes that serve other
# models have imported torch without them (:func:`tgi_cli.process.imports.without_meta_kernels`).
import torch._meta_registrations  # noqa: F401
