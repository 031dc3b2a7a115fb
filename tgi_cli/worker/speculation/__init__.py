"""Drafters with weights, run by the worker after each step; see docs/speculation.md."""
