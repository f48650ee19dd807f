"""The command `bosch show`."""
