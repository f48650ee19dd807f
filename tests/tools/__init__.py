"""Tools for developers, run by hand; no tests."""
