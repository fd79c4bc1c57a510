"""The advice of the pages, and that of errors, is followed literally by a test until the counts are right.

`ADVICE` has a row for each: of a table whose last column says what to do its first cell, and of a heading its anchor.
A page that gives new advice, or an error that points at it, needs a row and a test.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_docs import BLOCK, ROOT, anchors

DOCS = ROOT / "docs"
PAGES = ("operating", "kafka", "guides/moving", "guides/existing-job", "dataframes", "running")
DO = ("do", "what to do")  # heads of the columns that tell; the guides' tables of what to watch have none
PAGE_RUNS = "docs/test_docs.py::test_python_blocks_run"  # the page's own blocks, with what they assert

ADVICE: dict[str, str] = {
    # operating.md, the table of refusals
    "operating#each-refusal-and-what-to-do: StateOwnershipError": """
        spark/test_advice.py::test_the_old_checkpoint_put_back_goes_on
        spark/test_advice.py::test_a_second_job_takes_a_state_of_another_name
        spark/test_advice.py::test_a_lost_checkpoint_of_files_goes_on_where_the_state_ends
        spark/test_advice.py::test_a_state_that_is_reset_counts_the_replay_alone""",
    'operating#each-refusal-and-what-to-do: StateOwnershipError, "has not committed a batch"': """
        spark/test_advice.py::test_a_first_batch_that_was_never_committed_is_begun_anew
        spark/test_advice.py::test_a_non_transactional_state_without_a_batch_is_dropped_and_replayed""",
    'operating#each-refusal-and-what-to-do: ExecutorEnvironmentError, "Nothing was written"': """
        cluster/test_cluster.py::test_a_way_brings_the_packages_to_the_executors""",
    'operating#each-refusal-and-what-to-do: ExecutorEnvironmentError, "the batch is not committed"; '
    "StreamingQueryException in the first run: wrong Python on the executors": """
        spark/test_spark_faults.py::test_a_first_run_that_failed_on_the_executors_leaves_the_state_to_a_new_checkpoint
        spark/test_advice.py::test_a_non_transactional_state_without_a_batch_is_dropped_and_replayed""",
    'operating#each-refusal-and-what-to-do: UsageError: "twice in one run", '
    '"nothing tells", "has ended", "is at batch"': """
        spark/test_foreach_batch.py::test_parts_of_a_batch_from_a_pool_lose_no_row_in_silence
        spark/test_foreach_batch.py::test_an_opaque_state_takes_a_part_back_and_counts_the_whole_batch_next""",
    'operating#each-refusal-and-what-to-do: MissingBatchesError: "did not call state", "the foreachBatch function went '
    'on"': """
        spark/test_foreach_batch.py::test_a_batch_that_the_function_left_out_is_named_and_not_taken_for_a_lost_one""",
    'operating#each-refusal-and-what-to-do: IncompleteBatchError, "counts only a part", "may have written a part"': """
        spark/test_foreach_batch.py::test_a_part_that_cannot_be_taken_back_is_named_by_the_next_start""",
    'operating#each-refusal-and-what-to-do: StaleBatchError, "of a call by hand already"': """
        spark/test_foreach_batch.py::test_a_number_that_counts_already_is_refused_by_hand""",
    "operating#each-refusal-and-what-to-do: StaleBatchError with max_age, in a reader": """
        backends/test_max_age.py::test_no_call_answers_as_of_a_commit_that_is_older_than_max_age""",
    'operating#each-refusal-and-what-to-do: ReplannedBatchError, "The query that adopts it starts"': """
        spark/test_spark_faults.py::test_a_new_checkpoint_on_an_old_state
        spark/test_spark_offsets.py::test_a_new_checkpoint_goes_on_exactly_where_the_state_ends""",
    "operating#a-checkpoint-in-an-object-store": """
        operations/test_object_stores.py::test_a_rewind_leaves_the_files_that_it_leaves_on_a_disk
        operations/test_object_stores.py::test_a_rewind_that_is_killed_is_finished_by_the_next_and_spark_can_read_its_logs_in_between""",
    "operating#options-that-change": """
        spark/test_options.py::test_an_option_that_changes_on_a_state_that_exists_does_what_its_row_says""",
    "operating#changing-a-job: an option of opaque(...), of windows or of a URL": """
        spark/test_options.py::test_an_option_that_changes_on_a_state_that_exists_does_what_its_row_says""",
    "life#seed": """
        spark/test_seed.py::test_a_seed_that_died_goes_on_and_loads_nothing_twice
        protocol/test_seeding.py::test_a_crash_costs_one_attempt_and_a_lost_reply_nothing
        protocol/test_seeding.py::test_a_call_without_the_list_of_the_seed_is_refused
        protocol/test_seeding.py::test_nobody_else_counts_on_a_seed_that_is_not_complete""",
    "life#history-from-another-place": """
        spark/test_initial_rows.py::test_what_does_not_meet_is_refused_before_anything_is_written
        spark/test_initial_rows.py::test_a_history_that_begins_later_or_has_holes_counts_if_that_is_said
        spark/test_initial_rows.py::test_a_query_that_is_started_without_its_seed_is_refused_and_the_seed_goes_on_with_its_plan
        spark/test_initial_rows.py::test_a_source_that_tells_no_start_by_partition_is_refused""",
    "life#delta-and-iceberg": """
        protocol/test_adoption.py::test_a_first_batch_that_starts_beyond_its_end_is_refused_and_nothing_is_written
        spark/test_lakes.py::test_what_a_table_counts_and_what_is_refused_before_anything_is_written""",
    'operating#each-refusal-and-what-to-do: ReplannedBatchError, "in this run it starts at version"': """
        spark/test_lakes.py::test_what_a_table_counts_and_what_is_refused_before_anything_is_written""",
    "life#the-commands-of-a-job": """
        spark/test_commands.py::test_a_job_is_seeded_run_and_corrected_by_its_commands
        spark/test_commands.py::test_what_a_job_cannot_do_ends_with_2_and_the_message""",
    "life#correct": """
        spark/test_correct.py::test_it_is_there_once_after_a_crash_at_each_write
        spark/test_correct.py::test_a_key_without_rows_is_gone_and_more_than_was_counted_is_refused""",
    "life#compute-keys-anew": """
        spark/test_recount.py::test_a_history_that_does_not_end_where_the_last_batch_did_is_refused
        spark/test_recount.py::test_where_nothing_tells_where_the_last_batch_ended_it_is_refused
        spark/test_recount.py::test_a_batch_that_is_committed_while_the_history_is_read_is_not_lost
        spark/test_recount.py::test_a_recount_that_would_undo_corrections_is_refused_until_they_are_named""",
    "windows#a-clock-or-a-row-that-is-wrong": """
        operations/test_windowed_operations.py::test_a_watermark_that_is_put_back_opens_what_is_not_gone_and_the_next_batch_drags_it_no_more""",
    "features#changes-at-a-restart": """
        spark/test_features_page.py::test_each_change_at_a_restart_does_what_its_row_says""",
    "features#which-times-can-be-asked-for": """
        spark/test_features_page.py::test_times_can_be_asked_for_from_the_watermark_before_less_the_retention""",
    "features#history-first": PAGE_RUNS,
    "readers#how-old": """
        backends/test_max_age.py::test_no_call_answers_as_of_a_commit_that_is_older_than_max_age""",
    "life#rebuild-and-swap": """
        operations/test_swap.py::test_a_reader_follows_the_alias_and_a_name_without_one_is_itself""",
    "operating#each-refusal-and-what-to-do: MissingBatchesError": """
        spark/test_advice.py::test_a_store_put_back_from_a_copy_is_right_after_a_rewind
        spark/test_advice.py::test_a_store_put_back_from_a_copy_is_right_after_a_reset_and_a_replay
        spark/test_advice.py::test_who_accepts_a_gap_lacks_the_lost_batches_and_nothing_else""",
    "operating#each-refusal-and-what-to-do: StaleBatchError": """
        spark/test_advice.py::test_a_checkpoint_that_is_older_by_more_than_a_batch_is_refused_until_it_is_right""",
    'operating#each-refusal-and-what-to-do: ReplannedBatchError, "cannot be counted anew"': """
        spark/test_advice.py::test_a_transactional_batch_that_was_planned_anew_is_refused_until_it_is_right""",
    'operating#each-refusal-and-what-to-do: ReplannedBatchError, "is transactional and has batch N in flight"': """
        spark/test_advice.py::test_a_transactional_attempt_that_lost_its_plan_gets_it_back_or_is_replayed""",
    'operating#each-refusal-and-what-to-do: ReplannedBatchError, "two copies of one checkpoint"': """
        spark/test_advice.py::test_a_copy_of_a_checkpoint_that_went_its_own_way_is_put_away""",
    "operating#each-refusal-and-what-to-do: MissingKeysError": """
        spark/test_advice.py::test_keys_that_are_missing_come_back_with_a_copy_or_are_written_off""",
    "operating#each-refusal-and-what-to-do: LedgerLostError; StoreLostError: ledger gone, records there": """
        operations/test_ways_out.py::test_a_ledger_lost_while_the_query_is_stopped_is_made_anew_by_adopt
        operations/test_ways_out.py::test_a_ledger_lost_under_a_live_driver_is_made_anew_by_adopt
        operations/test_ways_out.py::test_a_ledger_that_cannot_be_made_anew_is_dropped_with_its_state_and_replayed""",
    "operating#each-refusal-and-what-to-do: StoreLostError: ledger and records gone": """
        operations/test_ways_out.py::test_a_store_emptied_under_a_live_driver_is_replayed_by_a_new_checkpoint
        operations/test_ways_out.py::test_an_old_snapshot_put_back_while_the_query_is_stopped_is_rewound_to""",
    "operating#each-refusal-and-what-to-do: StoreRestartedError: the store was put back to an older copy": """
        operations/test_ways_out.py::test_an_old_snapshot_put_back_in_mid_batch_is_no_second_driver
        operations/test_ways_out.py::test_an_old_snapshot_under_a_live_driver_is_told_as_one_and_rewind_repeats_what_it_lacks""",
    "operating#each-refusal-and-what-to-do: FencedError": """
        spark/test_spark_faults.py::test_a_second_driver_on_the_same_checkpoint_fences_the_first""",
    "operating#each-refusal-and-what-to-do: AlreadyAliveError": """
        spark/test_running.py::test_a_second_driver_of_the_name_is_refused_and_one_that_is_silent_is_taken_over""",
    "operating#each-refusal-and-what-to-do: NotAliveError": """
        operations/test_topologies.py::test_the_commands
        chaos/test_control_kills.py::test_a_command_is_obeyed_whenever_the_driver_dies""",
    "operating#each-refusal-and-what-to-do: ConfigurationError: the key ...!layout was deleted or evicted": """
        operations/test_ways_out.py::test_a_lost_layout_key_is_set_again_by_the_command_in_the_message""",
    "operating#each-refusal-and-what-to-do: StateSchemaError": """
        spark/test_advice.py::test_a_field_that_is_added_begins_with_the_next_row_of_a_key
        spark/test_advice.py::test_another_aggregate_takes_another_name_and_a_replay""",
    "operating#each-refusal-and-what-to-do: RollbackError, of a topology": """
        spark/test_advice.py::test_states_of_a_topology_that_went_apart_are_restored_from_one_moment_or_reset""",
    "operating#each-refusal-and-what-to-do: IncompleteBatchError": """
        chaos/test_late_writers.py::test_a_speculative_copy_of_a_task_writes_nothing""",
    "operating#each-refusal-and-what-to-do: IncompleteBatchError, new values lack keys": """
        spark/test_advice.py::test_states_that_follow_each_other_are_restored_from_one_moment
        spark/test_advice.py::test_states_that_follow_each_other_are_begun_anew_together""",
    "operating#each-refusal-and-what-to-do: MissingBatchesError, less than no rows": """
        spark/test_advice.py::test_states_that_follow_each_other_are_begun_anew_together""",
    "operating#each-refusal-and-what-to-do: MissingBatchesError, of a state and one that follows its new values": """
        spark/test_advice.py::test_a_state_that_follows_one_that_was_taken_back_is_taken_back_before_a_new_checkpoint
        spark/test_advice.py::test_states_that_follow_each_other_are_begun_anew_together""",
    "operating#each-refusal-and-what-to-do: UsageError: the stream sends totals": """
        spark/test_output_modes.py::test_an_aggregation_with_a_watermark_is_added_up_in_append_mode""",
    "operating#each-refusal-and-what-to-do: CheckpointError at start; Spark's own "
    "STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY": """
        spark/test_spark_faults.py::test_a_checkpoint_whose_driver_died_as_it_wrote_the_first_offsets_says_what_to_delete""",
    "operating#each-refusal-and-what-to-do: StoreFullError": """
        chaos/test_redis_faults.py::test_a_store_that_gets_full_in_mid_batch_counts_nothing_of_it_and_goes_on_with_more_memory
        chaos/test_sqlite_faults.py::test_a_disk_that_gets_full_in_mid_batch_counts_nothing_of_it_and_goes_on_with_more_room""",
    "operating#each-refusal-and-what-to-do: StoreUnavailableError": """
        spark/test_patience.py::test_a_server_that_is_away_for_some_seconds_does_not_end_a_job""",
    "operating#each-refusal-and-what-to-do: UpdaterError": """
        spark/test_partition_persist.py::test_an_updater_that_raises_stops_the_batch_and_no_state_follows""",
    "operating#each-refusal-and-what-to-do: ValueOverflowError": """
        spark/test_advice.py::test_a_sum_that_left_64_bits_is_cast_under_another_name_and_replayed""",
    "operating#each-refusal-and-what-to-do: CorruptRecordError": """
        spark/test_advice.py::test_a_record_that_mapstate_did_not_write_is_restored""",
    "operating#each-refusal-and-what-to-do: StaleBatchError that names a key, in a reader": """
        spark/test_advice.py::test_a_record_that_mapstate_did_not_write_is_restored""",
    "operating#each-refusal-and-what-to-do: CorruptLedgerError": """
        spark/test_advice.py::test_a_damaged_ledger_is_dropped_with_its_state_and_the_source_replayed""",
    "operating#each-refusal-and-what-to-do: CorruptStoreError": """
        spark/test_advice.py::test_a_damaged_file_is_restored_from_a_copy_and_the_checkpoint_rewound""",
    "operating#each-refusal-and-what-to-do: StoreAuthError": """
        spark/test_advice.py::test_a_user_of_the_store_gets_the_right_that_it_lacks_or_its_password""",
    "operating#each-refusal-and-what-to-do: KeyEncodingError, SerializationError, TooLargeError": """
        spark/test_advice.py::test_a_value_that_does_not_fit_is_changed_by_a_transform""",
    "operating#each-refusal-and-what-to-do: AggregatorError": """
        spark/test_advice.py::test_a_batch_counts_once_after_an_aggregator_was_repaired""",
    "operating#each-refusal-and-what-to-do: StoreLostError that names a window's key or the index of a pane": """
        spark/test_advice.py::test_a_record_of_a_window_that_was_lost_comes_back_with_a_copy_and_a_rewind""",
    "operating#each-refusal-and-what-to-do: ConfigurationError, of password_env, password_file or credentials": """
        spark/test_spark_stream.py::test_a_password_out_of_the_environment_is_not_in_what_py4j_logs
        spark/test_advice.py::test_a_user_of_the_store_gets_the_right_that_it_lacks_or_its_password""",
    # operating.md, the other sections
    "operating#after-a-restored-store-mapstate-rewind": """
        spark/test_advice.py::test_a_store_put_back_from_a_copy_is_right_after_a_rewind""",
    "operating#after-a-restored-checkpoint": """
        spark/test_replanned.py::test_a_checkpoint_that_is_one_batch_older_loses_no_row
        spark/test_advice.py::test_a_checkpoint_that_is_older_by_more_than_a_batch_is_refused_until_it_is_right""",
    "operating#a-lost-ledger": """
        operations/test_ways_out.py::test_a_ledger_lost_while_the_query_is_stopped_is_made_anew_by_adopt
        operations/test_ways_out.py::test_a_ledger_that_cannot_be_made_anew_is_dropped_with_its_state_and_replayed""",
    "operating#a-store-that-was-emptied": """
        operations/test_ways_out.py::test_a_store_emptied_while_the_query_is_stopped_is_replayed_by_a_new_checkpoint
        operations/test_ways_out.py::test_an_old_snapshot_put_back_while_the_query_is_stopped_is_rewound_to""",
    "operating#removing-a-state-mapstate-drop": """
        operations/test_ways_out.py::test_a_ledger_that_cannot_be_made_anew_is_dropped_with_its_state_and_replayed""",
    "operating#what-crashes-leave-behind-mapstate-vacuum": """
        operations/test_vacuum.py::test_the_stream_counts_on_above_a_vacuum""",
    "operating#how-many-keys": """
        spark/test_advice.py::test_keys_that_are_missing_come_back_with_a_copy_or_are_written_off""",
    "operating#changing-a-job: an aggregate is added": """
        spark/test_advice.py::test_a_field_that_is_added_begins_with_the_next_row_of_a_key""",
    "operating#changing-a-job: keys, types or an aggregate change": """
        spark/test_advice.py::test_another_aggregate_takes_another_name_and_a_replay""",
    "operating#changing-a-job: the length, slide or start of windows changes": """
        spark/test_advice.py::test_windows_of_another_length_take_another_name_and_a_replay""",
    "operating#changing-a-job: another store": """
        spark/test_advice.py::test_a_state_moves_to_another_store_by_a_replay""",
    "operating#changing-a-job: a job whose checkpoint already has batches begins to keep a state": """
        spark/test_advice.py::test_a_state_that_a_job_begins_late_counts_from_there_and_its_past_by_a_query_of_its_own""",
    "operating#changing-a-job: a new checkpoint": """
        spark/test_advice.py::test_a_lost_checkpoint_of_files_goes_on_where_the_state_ends""",
    "operating#changing-a-job: the last batch is taken back": """
        spark/test_advice.py::test_the_last_batch_taken_back_is_counted_again_after_a_rewind""",
    "operating#a-new-checkpoint-where-the-state-ends": """
        spark/test_advice.py::test_a_lost_checkpoint_of_files_goes_on_where_the_state_ends
        spark/test_spark_offsets.py::test_a_new_checkpoint_goes_on_exactly_where_the_state_ends
        spark/test_kafka.py::test_a_new_checkpoint_goes_on_at_the_offsets_of_the_state""",
    "operating#taking-the-last-batch-back-mapstate-rollback": """
        spark/test_advice.py::test_the_last_batch_taken_back_is_counted_again_after_a_rewind
        spark/test_advice.py::test_the_last_batch_of_a_topology_is_taken_back_in_all_of_its_states
        spark/test_advice.py::test_a_state_that_follows_another_is_taken_back_with_it""",
    # kafka.md
    "kafka#when-something-is-lost: the driver, a worker, the broker for a while": """
        spark/test_kafka.py::test_orders_count_once_though_driver_and_broker_are_killed""",
    "kafka#when-something-is-lost: the checkpoint": """
        spark/test_kafka.py::test_a_new_checkpoint_goes_on_at_the_offsets_of_the_state""",
    "kafka#when-something-is-lost: the store, restored from a copy": """
        spark/test_kafka.py::test_a_store_that_was_put_back_reads_the_orders_since_once_more""",
    "kafka#when-something-is-lost: the last batch was wrong": """
        spark/test_kafka.py::test_a_batch_that_is_taken_back_is_read_again_from_its_own_offsets""",
    "kafka#when-something-is-lost: records that the retention of the topic has removed before they were read": """
        spark/test_kafka.py::test_without_the_records_that_retention_took_all_others_count_once""",
    "kafka#where-a-new-checkpoint-starts": """
        spark/test_kafka.py::test_without_the_records_that_retention_took_all_others_count_once
        spark/test_kafka.py::test_a_partition_that_was_added_is_read_from_its_first_record
        spark/test_kafka.py::test_each_source_has_its_start_and_a_topic_that_was_made_anew_has_none""",
    "kafka#aborted-transactions": """
        spark/test_kafka.py::test_orders_of_aborted_transactions_do_not_count_and_their_offsets_are_passed""",
    "kafka#offsets-without-a-record": """
        spark/test_kafka.py::test_orders_of_aborted_transactions_do_not_count_and_their_offsets_are_passed""",
    # the guides and the other pages
    "guides/moving#back-up-and-restore-a-sqlite-file": PAGE_RUNS,
    "guides/moving#move-a-state-from-one-redis-to-another": f"""{PAGE_RUNS}
        spark/test_advice.py::test_a_state_moves_to_another_store_by_a_replay""",
    "guides/existing-job#add-a-state-to-an-existing-job": f"""{PAGE_RUNS}
        spark/test_advice.py::test_a_state_that_a_job_begins_late_counts_from_there_and_its_past_by_a_query_of_its_own""",
    "guides/moving#move-a-state-from-one-redis-to-another: An order for live backups": """
        spark/test_advice.py::test_a_store_put_back_from_a_copy_is_right_after_a_rewind""",
    "guides/moving#move-a-state-from-one-redis-to-another: How old a backup may be": """
        operations/test_checkpoint.py::test_refusals_change_nothing""",
    "guides/moving#move-a-state-from-one-redis-to-another: Several states of one stream": """
        spark/test_advice.py::test_states_of_a_topology_that_went_apart_are_restored_from_one_moment_or_reset""",
    "guides/moving#move-a-state-from-one-redis-to-another: Another kind of store": """
        spark/test_advice.py::test_a_state_moves_to_another_store_by_a_replay""",
    "guides/moving#move-a-state-from-one-redis-to-another: A SQLite file": """
        spark/test_advice.py::test_a_damaged_file_is_restored_from_a_copy_and_the_checkpoint_rewound""",
    "guides/existing-job#add-a-state-to-an-existing-job: The past": """
        spark/test_advice.py::test_a_state_that_a_job_begins_late_counts_from_there_and_its_past_by_a_query_of_its_own""",
    'guides/existing-job#add-a-state-to-an-existing-job: on_gap="accept"': """
        spark/test_advice.py::test_a_state_that_a_job_begins_late_counts_from_there_and_its_past_by_a_query_of_its_own""",
    "guides/existing-job#add-a-state-to-an-existing-job: Threads, parts, empty batches, retries": """
        spark/test_foreach_batch.py::test_a_whole_batch_from_a_pools_thread_counts_as_from_the_querys_own
        spark/test_foreach_batch.py::test_a_retry_with_the_same_frame_is_no_second_part""",
    "guides/existing-job#add-a-state-to-an-existing-job: A stream of totals": """
        spark/test_output_modes.py::test_totals_of_a_query_that_runs_are_refused_at_its_first_batch""",
    "dataframes#following-a-state": """
        spark/test_advice.py::test_who_follows_a_state_that_went_back_reads_it_anew""",
    "running#what-happens-when": """
        spark/test_running.py::test_a_second_driver_of_the_name_is_refused_and_one_that_is_silent_is_taken_over
        spark/test_running.py::test_a_store_that_was_emptied_ends_the_run
        chaos/test_control_kills.py::test_a_command_is_obeyed_whenever_the_driver_dies""",
    "operating#a-login-of-a-cloud": """
        backends/test_redis_clouds.py::test_aws_takes_a_signed_token_for_each_connection
        backends/test_redis_clouds.py::test_aws_without_an_identity_a_region_or_a_user_is_refused
        backends/test_redis_clouds.py::test_a_token_serves_until_it_expires
        backends/test_redis_clouds.py::test_a_token_that_expires_is_renewed_for_the_next_connection""",
    "running#images": """
        operations/test_images.py::test_the_image_calls_the_service_as_it_is
        operations/test_images.py::test_a_job_in_its_image_counts_what_the_service_and_the_commands_read""",
    # other pages at which errors point
    "cluster#an-executor-lacks-the-package": """
        cluster/test_cluster.py::test_a_way_brings_the_packages_to_the_executors""",
    "connect#how-a-query-is-started": """
        spark/test_connect_once_more.py::test_every_key_is_right_after_several_batches""",
    "versions#the-oldest-pyspark": """
        spark/test_spark35.py::test_batches_count_new_values_come_and_windows_fire_with_them
        spark/test_state_query.py::test_rows_get_the_fields_of_their_keys_and_nulls_where_there_are_none""",
    "versions#declarative-pipelines": """
        spark/test_pipelines.py::test_a_state_counts_a_table_of_a_pipeline_that_reads_the_state""",
    "redis#hashes": """
        backends/test_redis_shapes.py::test_who_makes_a_state_with_packed_records_is_told_what_to_take_and_who_has_one_is_not
        spark/test_blocks_on_spark.py::test_every_way_counts_as_a_record_per_key_does""",
    "guarantees#rows-are-increments": """
        spark/test_output_modes.py::test_an_aggregation_with_a_watermark_is_added_up_in_append_mode""",
}

# Still without a test that follows the advice to the right counts, with what has to be written.
TO_DO = {
    "guides/moving#move-a-state-from-one-redis-to-another: A Redis Cluster": "all masters of a cluster, and rewind",
}

# What only explains or looks, by heading; and at which errors point for an explanation.
NO_ADVICE = {
    *("operating#operating-a-state", "operating#looking-mapstate-ledger", "operating#passwords"),
    *("operating#before-something-happens-mapstate-doctor", "operating#each-refusal-and-what-to-do"),
    *("operating#what-is-retried", "operating#what-start-checks", "operating#changing-a-job"),
    *("kafka#kafka", "kafka#when-something-is-lost", "kafka#sending-to-kafka"),
    *("guides/moving#moving-backing-up-and-restoring-a-state",),
    *("dataframes#a-state-as-a-dataframe", "dataframes#some-columns-some-keys", "dataframes#what-a-scan-costs"),
    *("running#a-job-that-obeys", "running#under-a-supervisor", "running#monitor"),
    "guides/moving#move-a-state-from-one-redis-to-another: Keys copied one by one",
    "guides/moving#move-a-state-from-one-redis-to-another: The old copy",
    "guides/existing-job#add-a-state-to-an-existing-job: The other sink",
    "guides/existing-job#add-a-state-to-an-existing-job: Rows used twice",
    *("connect#what-is-refused", "windows#sessions", "windows#reading-windows"),
}


def plain(cell: str) -> str:
    """A cell without its marks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip()


def rows_that_tell(page: Path) -> set[str]:
    """Section and first cell of each row of a table that says what to do."""
    found, anchor, telling, inside = set(), "", False, False
    for line in BLOCK.sub("", page.read_text()).splitlines():
        if title := re.match(r"#+ (.+)$", line):
            anchor = re.sub(r"[^\w -]", "", title[1].lower()).replace(" ", "-")
        if not line.startswith("|"):
            inside = False
            continue
        cells = [plain(cell) for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        if not inside:
            inside, telling = True, cells[-1] in DO or (page.parent.name == "guides" and not cells[-1])
        elif telling and set(cells[0]) != {"-"}:
            found.add(f"{anchor}: {cells[0]}")
    return found


def of_pages() -> set[str]:
    """All headings of the pages, and all rows that tell what to do."""
    return {
        f"{name}#{one}"
        for name in PAGES
        for page in [DOCS / f"{name}.md"]
        for one in anchors(page) | rows_that_tell(page)
    }


def of_errors() -> set[str]:
    """The headings at which messages in the sources point."""
    text = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # a message goes over lines
    return {f"{page}#{anchor}" for page, anchor in re.findall(r"\bdocs/([\w/-]+)\.md#([\w-]+)", text)}


def test_every_advice_of_the_pages_and_of_the_errors_has_a_row():
    known = ADVICE.keys() | TO_DO.keys() | NO_ADVICE
    assert sorted((of_pages() | of_errors()) - known) == []


def test_no_row_is_of_advice_that_is_gone():
    assert sorted((ADVICE.keys() | TO_DO.keys() | NO_ADVICE) - of_pages() - of_errors()) == []
    assert ADVICE.keys() & TO_DO.keys() == set()


@pytest.mark.parametrize("advice", ADVICE)
def test_the_tests_of_a_row_are_there(advice):
    for name in ADVICE[advice].split():
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        imported = {one.name for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names}
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | imported, name
