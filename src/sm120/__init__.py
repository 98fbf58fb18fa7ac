"""The SM120 stack toolkit. Runs in its own small environment and never imports torch or ``sm120_cells``."""

__version__ = "0.1.0"
