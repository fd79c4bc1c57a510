"""What a look at a state or its store finds: one small record each, for `mapstate doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Finding", "Severity"]

Severity = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One thing that was looked at. ``error``: what is promised does not hold, or soon will not.

    ``advice`` says what an operator can do; empty where all is well. Nothing in it is a secret.
    """

    severity: Severity
    subject: str
    found: str
    expected: str
    advice: str = ""
