"""Charts, tables and templates of pages."""
