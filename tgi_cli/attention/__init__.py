"""Paged attention per device behind one small interface."""
