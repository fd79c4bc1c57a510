"""The test kit: contracts for a store, stores that fail on purpose, servers in Docker. See docs/testing.md."""

from __future__ import annotations

from mapstate.testing.crash import crash_between
from mapstate.testing.faults import (
    Begins,
    Call,
    Commits,
    Fail,
    Fault,
    FaultyBackend,
    FaultyStore,
    ForgetfulBackend,
    ForgetfulStore,
    HasKey,
    Kill,
    Mark,
    RecordedCall,
    Wait,
    calling_executor,
    wait_for,
)

__all__ = [
    "Begins",
    "Call",
    "Commits",
    "Fail",
    "Fault",
    "FaultyBackend",
    "FaultyStore",
    "ForgetfulBackend",
    "ForgetfulStore",
    "HasKey",
    "Kill",
    "Mark",
    "RecordedCall",
    "Wait",
    "calling_executor",
    "crash_between",
    "wait_for",
]
