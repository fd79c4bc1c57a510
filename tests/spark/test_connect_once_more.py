"""Tests of classic PySpark, once more with a session of Spark Connect: with ``--chaos full``, because they are many."""

from __future__ import annotations

import pytest
from test_connect_around import (  # noqa: F401  its own stores, not all that there are
    each_url,
    server,
    spark,
    url,
)
from test_drpc import (  # noqa: F401
    counts,
    test_a_job_for_which_nobody_waits_is_ended,
    test_the_first_of_many,
    test_the_sum_of_the_counts_of_some_words,
    test_two_hundred_at_once_are_few_jobs,
)
from test_following import (  # noqa: F401
    orders,
    test_a_batch_that_was_rolled_back_is_taken_back,
    test_a_running_stream_follows_a_running_stream,
    test_a_stream_has_the_state_at_first_and_then_what_each_commit_wrote,
    test_who_comes_too_late_is_told,
)
from test_keys_beside_spark import (  # noqa: F401
    test_a_null_struct_is_refused_and_by_its_fields_it_is_one_key_with_a_struct_of_nulls,
    test_an_expression_is_no_column_that_happens_to_have_its_name,
)
from test_replanned import (  # noqa: F401
    test_a_checkpoint_that_is_one_batch_older_loses_no_row,
    test_all_states_of_a_topology_count_a_batch_anew_that_was_planned_anew,
)
from test_spark_offsets import (  # noqa: F401
    test_a_checkpoint_is_read_where_spark_puts_it,
    test_a_new_checkpoint_goes_on_exactly_where_the_state_ends,
    test_a_source_that_brings_nothing_for_a_while_forgets_nothing,
    test_each_source_has_its_entry_in_the_order_of_the_plan,
    test_over_many_batches_and_a_compacted_log_the_newest_is_right,
)
from test_spark_stream import (  # noqa: F401
    test_every_key_is_right_after_several_batches,
)

pytestmark = [pytest.mark.spark, pytest.mark.full, pytest.mark.since("4.0", "Spark Connect")]
