"""Resolves model ids to local folders: download, resume, verify, convert, merge adapters.

Importing its modules is cheap: they import their libraries when they are called.
"""
