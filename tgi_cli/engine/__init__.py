"""Requests in, tokens out: scheduling, KV blocks and the core loop.

Independent of HTTP, gRPC, text and torch.
"""
