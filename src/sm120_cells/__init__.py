"""Cells of the numerics matrix: what runs inside the Python of a stack; needs the standard library, numpy and torch."""
