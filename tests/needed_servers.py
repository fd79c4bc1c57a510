"""What a test does where a server that it needs is not to be had."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def without_server(what: str) -> NoReturn:
    """Skips; on CI, where a server has to be there, fails."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
