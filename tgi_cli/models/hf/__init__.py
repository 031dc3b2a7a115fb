"""Causal language models of transformers, run with our layers and paged attention."""

from tgi_cli.process.minimal_torch import complete_torch

# Models are built and tried on the meta device, with operators that processes which serve other
# models leave out.
complete_torch()
