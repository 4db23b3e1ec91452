"""Data programs: tokenizers and token files from text."""
