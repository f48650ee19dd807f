"""Hybrids for engines other than transformers: a module for each, and none knows another."""
