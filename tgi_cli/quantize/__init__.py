"""Creates quantized checkpoints: calibration, one block after the other, evaluation, model card.

The arithmetic and the layouts of files are in ``quantization/algorithms``. This package decides the
order of work: which block is in memory, what is on disk, and where a run can resume.
"""
