"""The command `bosch repair`."""
