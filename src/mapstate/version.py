"""The version of the package, which pyproject.toml takes from here: a zip of the source has no metadata."""

VERSION = "0.2.0.dev0"
