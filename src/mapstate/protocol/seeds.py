"""What a ledger keeps of a seed: how far the history of a state is loaded. Pure, as `mapstate.protocol.changes`."""

from __future__ import annotations

import msgspec

from mapstate.protocol.windows import WindowCommit


class SeedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that is not complete. Its rows are staged once, and loaded in buckets of whole keys, one after the other.

    ``plan``     the digest of batch 0, of the job's fields, and of the list; another one begins the seed anew
    ``listed``   how many entries it has of a list of forgotten keys, which it copies
    ``initial``  whether rows of another place are a part of it
    ``stage``    the name of the stage, once it is whole
    ``files``    how many files it has
    ``staged``   how many rows of the history are in it
    ``forgotten``  how many rows were left out by the list
    ``buckets``  how many there are to load
    ``windows``  of a state whose rows have times: what the stage, which is all of batch 0, says of them
    ``done``     how many of them count
    ``rows``, ``keys``, ``keys_delta``  the sums over these, as a `Commit` has them
    """

    plan: str
    listed: int = 0
    initial: bool = False
    stage: str | None = None
    files: int = 0
    staged: int = 0
    forgotten: int = 0
    buckets: int = 0
    windows: WindowCommit | None = None
    done: int = 0
    rows: int = 0
    keys: int = 0
    keys_delta: int | None = 0

    @property
    def progress(self) -> str:
        """How far it is, for messages."""
        return "its history is being staged" if self.stage is None else f"{self.done} of {self.buckets} buckets"

    @property
    def reading(self) -> str | None:
        """The name of the reading of the history that the stage is of: states of one reading have the same rows."""
        return self.stage and self.stage.rpartition("-")[2]

    @property
    def is_loaded(self) -> bool:
        """Whether only the end is left to do."""
        return self.stage is not None and self.done == self.buckets

    def loaded(self, rows: int, keys: int, keys_delta: int | None) -> SeedRecord:
        """With one more bucket."""
        return msgspec.structs.replace(
            self,
            done=self.done + 1,
            rows=self.rows + rows,
            keys=self.keys + keys,
            keys_delta=None if None in (self.keys_delta, keys_delta) else (self.keys_delta or 0) + (keys_delta or 0),
        )

    def has_flaw(self, last_txid: int | None) -> bool:
        """Whether this is damaged: no event leaves it in a ledger with that last txid."""
        numbers = self.files, self.staged, self.done, self.rows, self.keys, self.listed, self.forgotten
        return min(numbers) < 0 or self.done > self.buckets or (self.done > 0) != (last_txid is not None)
