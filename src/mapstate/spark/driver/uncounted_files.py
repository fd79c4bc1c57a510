"""Which files a new query has still to read, where a state ends: for a job that lost its checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mapstate.errors import UsageError
from mapstate.protocol.plans import digest_of_files
from mapstate.spark.driver.access_interface import FILTER_NAME
from mapstate.spark.driver.offsets import NO_HOST

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["files_not_counted"]


def files_not_counted(offsets: str | None, source: int = 0) -> Column:
    """A condition on a file source's rows: those of files that are behind where ``offsets`` ends.

    ``offsets`` is that of a `Commit`; ``source`` the place of the file source in it. For a query with a new
    checkpoint that goes on where the state ends (``on_new_owner="adopt"``). Files that come later with
    an older modification time are left out. Raises UsageError where ``offsets`` does not tell.
    """
    from pyspark.sql import functions as F

    entries = json.loads(offsets) if offsets is not None else []
    entry = entries[source] if source < len(entries) else None
    if not isinstance(entry, dict) or "newest" not in entry:
        raise UsageError(
            f"the offsets {offsets} do not tell which files of source {source} were read last. Put the old checkpoint "
            "back, or start empty with on_new_owner='reset'."
        )
    time = F.unix_millis("_metadata.file_modification_time")
    path = F.regexp_replace("_metadata.file_path", NO_HOST.pattern, "$1/")
    fresh = ~path.isin(entry["paths"])
    name = F.lit(FILTER_NAME + digest_of_files(entry))  # by which a query that adopts the state is known to have it
    condition: Column = name.isNotNull() & ((time > entry["newest"]) | ((time == entry["newest"]) & fresh))
    return condition
