"""Hybrids for engines other than transformers: a module or folder for each; none knows another."""
