"""Runs one scheduled step on the device: persistent rows, KV cache, model runner."""
