"""Preprocessing by family, on transformers' image processors for Pillow and numpy."""
