"""Training documents and samples of tasks."""
