"""A file per family: config.json read into a DecoderSpec, the checkpoint's names. No torch."""
