"""The test kit: contracts of a store, failing stores, servers in Docker. See docs/testing-with-faults.md."""

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
