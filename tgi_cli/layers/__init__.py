"""Blocks that every family shares: linear, embedding, norm, rotary, attention, mlp."""
