"""What the report is made of: the stages' results, figures, the page, the terminal table."""
