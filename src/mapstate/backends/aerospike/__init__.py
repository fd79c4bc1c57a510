"""Aerospike: a cluster named by ``aerospike://host:3000/namespace/set``."""

from mapstate.backends.aerospike.backend import AerospikeBackend
from mapstate.backends.aerospike.store import AerospikeStore

__all__ = ["AerospikeBackend", "AerospikeStore"]
