"""Formats of reasoning and tool calls: a table, the inference of others, and their parsers."""
