"""Every method at every ratio, side by side."""
