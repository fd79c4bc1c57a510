"""The command that answers over HTTP: serve."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from mapstate.backends import missing_file
from mapstate.cli.arguments import StoreUrl, store_url
from mapstate.cli.show import say
from mapstate.errors import UsageError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def serve(
    *,
    url: StoreUrl = None,
    host: Annotated[str, typer.Option(help="the address to listen on; by default this machine alone")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one")] = 8080,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="the environment variable with the token that callers send", show_default=False
        ),
    ] = None,
    functions: Annotated[
        str | None,
        typer.Option(metavar="MODULE", help="functions over states that POST /drpc/NAME calls", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="within which a request is answered")] = 10.0,
) -> None:
    """Answers reads over HTTP, with a live page, until Ctrl-C. It only reads the store.

    Another --host than this machine needs a token.
    """
    place = store_url(url)
    token = None if token_env is None else os.environ.get(token_env, "")
    if token == "":
        raise UsageError(f"the environment variable {token_env} has no token. Nothing was started.")
    is_local = host in _LOOPBACK
    if token is None and not is_local:
        raise UsageError(
            f"on {host} other machines can read all states: give a token with --token-env NAME. Nothing was started."
        )
    if missing := missing_file(place):
        say(f"mapstate: {missing} Its states are served once it is there.", err=True)
    from mapstate.serve import make_app  # takes long to import
    from mapstate.serve.server import run

    if functions is not None:
        sys.path.insert(0, "")  # as python -m has it, and a console script has not
    app = make_app(place, token=token, local_only=is_local and token is None, functions=functions, timeout=timeout)
    run(app, host, port, on_start=lambda address: say(f"Serving on {address} (Ctrl-C ends it)", err=True))
