"""Scripts behind the figures in docs/notes, on the library's public functions."""
