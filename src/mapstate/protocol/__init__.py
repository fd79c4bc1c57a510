"""The protocol: what a batch, an attempt and a commit are, and which records count."""
