"""Requests in, tokens out. Owns time: requests, scheduling, blocks, the core loop.

Knows no HTTP, no gRPC and no text; its scheduler and block pool know no torch either.
"""
