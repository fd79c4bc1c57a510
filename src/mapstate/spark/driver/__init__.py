"""One batch on the driver: begin, attempts, commit, what lies downstream."""
