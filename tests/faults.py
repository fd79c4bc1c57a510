"""The faults of `mapstate.testing`, by the name that tests import them by."""

from mapstate.testing.faults import FaultyBackend, Kill, Wait, wait_for

__all__ = ["FaultyBackend", "Kill", "Wait", "wait_for"]
