"""The JSON bodies of each API, as types."""
