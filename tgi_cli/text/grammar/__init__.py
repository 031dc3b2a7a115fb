"""Grammars for structured output: parsing, compilation and checks, in bounded processes."""
