"""tgi: serve language models on your own machine, as Text Generation Inference did."""

__version__ = "0.1.0"
