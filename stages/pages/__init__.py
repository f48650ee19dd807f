"""What pages are made of: charts, tables and templates."""
