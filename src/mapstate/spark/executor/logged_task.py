"""What runs on an executor for a state with a change log."""

from __future__ import annotations

from typing import Any

from mapstate.maps.change_log import ChangeLog
from mapstate.maps.pane_index import index_codec
from mapstate.spark.executor.task import BatchTask


class LoggedTask(BatchTask):
    """A task that also writes down which keys it has written. Picklable."""

    make_log = ChangeLog

    def key_index(self, writer: Any, partition: int) -> ChangeLog:
        """See `BatchTask.key_index`. In a task's memory until its end: the text of its keys."""
        codec = index_codec(self.spec.serializer, self.spec.state)
        return self.make_log(writer, codec, self.view, self.txid, partition)
