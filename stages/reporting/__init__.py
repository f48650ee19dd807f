"""What the report is made of: results read from the stages, figures, the page, the terminal table."""
