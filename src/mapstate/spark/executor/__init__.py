"""One task on an executor."""
