"""Evidence about Triton's kernels on a machine without a GPU: what their machine code takes."""
