"""Committed reads over HTTP, for services in any language: ``mapstate serve URL``, or `make_app` in a server of yours.

    requests ──> app ──> states ──> merged reads ──> AsyncStateReader ──> store
                  │         └─────> commits: follows the ledgers that somebody waits for
                  └───> answers: JSON, tags, problems

It only reads: the rights of a reader are enough for its user of the store.
"""

from __future__ import annotations

from mapstate.errors import missing_driver

try:
    import starlette  # noqa: F401  the extra has more, but these come together
except ModuleNotFoundError as error:
    raise missing_driver("mapstate serve", error, extra="serve") from error

from mapstate.serve.app import make_app

__all__ = ["make_app"]
