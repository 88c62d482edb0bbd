"""Which tests stand for which row of the fault table: those named ``test_row_NN``, and those named here, which live
beside what they test."""

from __future__ import annotations

ROWS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "writer killed at random",
        (
            "tests/writer_service/recover/test_recovery.py::test_kill_9_in_mid_stream",
            "tests/faults/test_state_machine.py::test_anything_in_any_order",
        ),
    ),
    2: (
        "writer killed at named points",
        ("tests/writer_service/recover/test_recovery.py::test_a_seal_cut_at_every_step",),
    ),
    3: (
        "engine killed in mid-request",
        (
            "tests/writer_service/test_writer.py::test_engine_lost_by_silence_by_bye_and_come_back",
            "tests/writer_service/recover/test_recovery.py::test_engines_that_do_not_come_back_are_lost",
        ),
    ),
    4: (
        "API killed or cut off",
        (
            "tests/api/test_outage.py::test_a_stop_with_a_request_in_flight_is_quick_and_ends_it_upstream",
            "tests/vllm_tap/serve/test_supervisor.py::test_a_killed_writer_or_api_is_started_again",
        ),
    ),
    5: ("SIGTERM under load", ()),
    6: (
        "full disk",
        (
            "tests/writer_service/recover/test_recovery.py::test_a_full_disk_and_space_again",
            "tests/writer_service/journal/test_parallel_append.py::test_a_disk_that_fills_in_the_midst_of_a_burst",
        ),
    ),
    7: (
        "full disk, the log alone",
        (
            "tests/writer_service/upkeep/test_erasing.py::test_a_log_left_after_a_write_that_failed_ends_with_its_last_record",
            "tests/writer_service/recover/test_recovery.py::test_a_full_disk_and_space_again",
            "tests/writer_service/recover/test_recovery.py::test_a_full_disk_leaves_no_descriptors_and_files_behind",
        ),
    ),
    8: ("short writes, a limit on file size", ()),
    9: (
        "the Nth write or rename fails",
        ("tests/writer_service/journal/test_parallel_append.py::test_a_seal_that_failed_is_tried_again",),
    ),
    10: (
        "the Nth sync fails",
        (
            "tests/writer_service/recover/test_recovery.py::test_a_failed_sync_is_never_believed",
            "tests/writer_service/recover/test_recovery.py::test_a_failed_sync_forgets_what_the_record_did",
        ),
    ),
    11: (
        "power loss",
        (
            "tests/writer_service/upkeep/test_erasing.py::test_what_was_erased_does_not_come_back",
            "tests/writer_service/upkeep/test_erasing.py::test_a_power_loss_in_the_midst_of_an_erasure",
            "tests/writer_service/tools/test_compaction.py::test_a_power_loss_after_it",
            "tests/writer_service/test_durability.py",
            "tests/writer_service/recover/test_recovery.py::test_what_a_killed_writer_left_is_synced_before_senders_hear_of_it",
            "tests/writer_service/recover/test_recovery.py::test_a_power_loss_that_keeps_rows_but_not_their_open",
        ),
    ),
    12: (
        "slow disk",
        ("tests/engine_side/transport/test_sender.py::test_waiting_loses_nothing_however_small_the_ring",),
    ),
    13: (
        "frozen writer",
        ("tests/engine_side/transport/test_sender.py::test_a_writer_that_is_away_costs_no_memory_by_the_step",),
    ),
    14: (
        "frozen engine",
        (
            "tests/writer_service/test_writer.py::test_engine_lost_by_silence_by_bye_and_come_back",
            "tests/writer_service/test_writer.py::test_the_memory_of_an_engine_that_ended_is_let_go",
        ),
    ),
    15: (
        "connection cut and made again",
        (
            "tests/schemas/wire/test_control_channel.py::test_what_is_lost_on_the_way_is_sent_again",
            "tests/schemas/wire/test_control_channel.py::test_a_real_writer_killed_and_started_again",
        ),
    ),
    16: (
        "what is lost or late on the way",
        (
            "tests/schemas/wire/test_control_channel.py::test_what_is_lost_on_the_way_is_sent_again",
            "tests/schemas/wire/test_control_channel.py::test_a_refusal_survives_a_reconnect",
        ),
    ),
    17: ("messages twice", ("tests/writer_service/test_writer.py::test_duplicates_and_gaps",)),
    18: ("messages out of order and late", ("tests/writer_service/test_writer.py::test_duplicates_and_gaps",)),
    19: (
        "two writers on one store",
        (
            "tests/writer_service/test_writer.py::test_second_writer_is_refused",
            "tests/writer_service/recover/test_recovery.py::test_two_first_starts_at_once_make_one_store",
        ),
    ),
    20: ("malformed messages", ("tests/writer_service/receive/test_malformed.py",)),
    21: (
        "declared sizes that lie",
        (
            "tests/writer_service/receive/test_malformed.py::test_frames_that_lie_are_refused_by_number",
            "tests/writer_service/receive/test_malformed.py::test_billions_of_positions_cost_no_memory",
        ),
    ),
    22: ("decompression bomb", ()),
    23: ("code in a payload", ("tests/writer_service/receive/test_malformed.py::test_arbitrary_bytes",)),
    24: (
        "a peer who may not",
        (
            "tests/writer_service/test_writer.py::test_what_is_stored_belongs_to_one_user",
            "tests/writer_service/test_writer.py::test_unknown_identities_are_told_to_greet",
            "tests/writer_service/test_writer.py::test_bad_settings_end_the_start",
        ),
    ),
    25: ("names that are paths", ()),
    26: ("no key, a wrong one", ("tests/api/auth/test_keys.py",)),
    27: (
        "another owner's captures",
        (
            "tests/api/auth/test_keys.py::test_anothers_captures_are_as_if_absent",
            "tests/api/auth/test_keys.py::test_a_request_id_is_its_callers",
            "tests/api/auth/test_keys.py::test_the_owner_survives_a_rebuilt_catalog",
        ),
    ),
    28: ("silly slices", ()),
    29: ("slow clients", ()),
    30: ("fuzzing by the schema", ("tests/api/test_schema.py",)),
    31: (
        "reading during sealing, delete and compaction",
        (
            "tests/writer_service/seal/test_sealing.py::test_readers_go_on_while_segments_are_sealed",
            "tests/line/test_reads_while.py",
            "tests/writer_service/upkeep/test_erasing.py",
            "tests/writer_service/tools/test_compaction.py::test_a_reader_meets_it",
        ),
    ),
    32: ("clock jumps", ()),
    33: (
        "bits that rot",
        (
            "tests/writer_service/seal/test_sealing.py::test_rot_in_a_block_is_named_and_costs_only_its_frame",
            "tests/writer_service/seal/test_sealing.py::test_a_bit_that_flips_after_a_read_is_seen_at_the_next",
            "tests/writer_service/recover/test_recovery.py::test_torn_tails",
        ),
    ),
    34: ("missing and stray files", ("tests/writer_service/tools/test_fsck.py",)),
    35: (
        "other versions",
        (
            "tests/writer_service/recover/test_recovery.py::test_what_a_newer_version_wrote_is_not_cut_off",
            "tests/writer_service/test_writer.py::test_a_greeting_of_another_version_is_refused_for_good",
            "tests/writer_service/test_writer.py::test_versions_epochs_and_names_of_streams",
        ),
    ),
    36: ("leaks", ("tests/writer_service/test_writer.py::test_a_running_capture_costs_the_same_with_every_commit",)),
    37: ("rows of another request, layer or position", ("tests/engine/test_coded_rows.py",)),
    38: ("a device that lies about a sync", ()),
    39: (
        "push killed in mid-upload",
        ("tests/faults/uploads/test_uploads.py::test_push_killed_in_mid_upload",
         "tests/vllm_tap/bucket/test_eviction.py::test_killed_in_the_middle",
         "tests/vllm_tap/bucket/test_eviction.py::test_cut_at_every_change_of_the_disk"),
    ),
}
NOT_APPLICABLE = {
    22: "nothing that comes in is decompressed",
}
NOT_SURVIVED = {
    38: "not survived: what it had acknowledged and not written is lost; manifests say that it is missing",
}
