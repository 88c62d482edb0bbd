"""Every named maximum, with its unit last. Sizes are checked against these before memory is taken."""

from typing import Final

PROTOCOL_VERSION: Final = 2
STORE_VERSION: Final = 2  # stores of all versions before are read, and written on as this one

# What a caller may ask for.
spec_json_bytes_max: Final = 64 * 1024
spec_sites_max: Final = 4096
spec_intervals_max: Final = 4096
spec_tags_max: Final = 64
tag_key_chars_max: Final = 64
tag_value_chars_max: Final = 512
capture_samples_max: Final = 4096
edits_max: Final = 8  # of one request, those with rows of their own apart
edits_of_rows_max: Final = 1024  # of one request, all together: rows of a capture are an edit of each layer
edit_intervals_max: Final = 64  # of one edit's positions
edit_json_bytes_max: Final = 4 * 1024 * 1024
edit_depth_max: Final = 8  # of one row, site and layer
edit_heads_max: Final = 256  # of one edit
edit_rows_max: Final = 65_536  # of all requests that an engine has
alias_chars_max: Final = 256
position_max: Final = 2**31 - 1
probes_max: Final = 64  # of one engine
probe_scores_max: Final = 1024  # of one probe
probe_name_chars_max: Final = 64
probe_file_bytes_max: Final = 64 * 1024 * 1024  # and of a vector's
vectors_max: Final = 1024  # that one key has stored
vectors_bytes_max: Final = 256 * 1024 * 1024  # of the files of them
vector_width_max: Final = 1 << 19  # of a stored one: as base64 it fits edit_json_bytes_max
vector_body_bytes_max: Final = 32 * 1024 * 1024
engines_max: Final = 64  # behind one gateway
layers_max: Final = 1024
width_max: Final = 1 << 20
parts_max: Final = 1024  # ranks of one engine that send
layout_places_max: Final = 1 << 18  # parts × their sites × layers

# What travels on the wire.
message_header_bytes_max: Final = 16 * 1024 * 1024
frame_bytes_target: Final = 8 * 1024 * 1024
encode_bytes_max: Final = 64 * 1024 * 1024  # of rows as float32 that are encoded at a time
frame_delay_ms: Final = 50
frame_bytes_max: Final = 512 * 1024 * 1024
frame_rows_max: Final = 1 << 20
frame_captures_max: Final = 1 << 16
frame_runs_max: Final = 1 << 16
payload_part_bytes: Final = 4 * 1024 * 1024
payload_window_bytes_max: Final = 256 * 1024 * 1024  # on their way to a writer that shares no memory
records_pending_bytes_max: Final = 128 * 1024 * 1024  # of an engine; then it begins no captures
sender_window_frames_max: Final = 1024
heartbeat_interval_ms: Final = 1000
engine_lost_after_ms: Final = 15_000
control_records_pending_max: Final = 4096
control_submit_timeout_ms: Final = 5000
handshake_ms: Final = 5000  # then whoever has connected must have shown its key
handshakes_max: Final = 256  # that have not ended, at one of the writer's sockets
handshakes_peer_max: Final = 64  # of them, from one address, or one process of this host
connections_local_max: Final = 4096  # to the writer; less where it may have fewer files open
connections_remote_max: Final = 2048  # from other hosts
connections_peer_max: Final = 512  # of them, from one address; less where it is more than a quarter of the room
descriptors_reserved: Final = 256  # of the writer, for its files, whoever comes

# What lies on the disk.
section_align_bytes: Final = 4096
segment_bytes_target: Final = 256 * 1024 * 1024
commit_bytes_target: Final = 32 * 1024 * 1024
commit_delay_ms: Final = 50

# What lies in a bucket.
bucket_head_bytes_max: Final = 64 * 1024
bucket_known_heads_max: Final = 1024  # that a store's folder remembers to have pushed, the latest
bucket_known_bytes_max: Final = 8 * 1024 * 1024
bucket_shown_max: Final = 1000  # captures that are lost, and foreign objects, in a report
bucket_epoch_max: Final = 10**9
bucket_index_bytes_max: Final = 512 * 1024 * 1024  # a block's small arrays
bucket_index_sides_bytes: Final = 16 * 1024 * 1024  # of side arrays that are in it whole, so that they take no request
bucket_catalog_bytes_max: Final = 64 << 30
bucket_chunk_bytes: Final = 256 * 1024  # of rows, in a reader's cache
bucket_request_bytes_max: Final = 8 * 1024 * 1024
bucket_batch_bytes: Final = 64 * 1024 * 1024  # of chunks in memory at once
bucket_cache_bytes_min: Final = 16 * 1024 * 1024
bucket_cache_bytes: Final = 4 << 30  # of a reader that names no other

# What a reader may take at once.
slice_bytes_max: Final = 1 << 30
attention_bytes_max: Final = 64 * 1024 * 1024  # of weights that are computed at a time
attention_weights_max: Final = (1 << 26) + (1 << 16)  # that a request may make: some ten seconds of a core
attention_heads_max: Final = 1 << 10  # named in one request
slices_in_flight_bytes_max: Final = 2 << 30
slice_ranges_max: Final = 256
slice_json_numbers_max: Final = 1 << 18
zarr_chunk_bytes_target: Final = 4 << 20  # of a chunk of rows in the Zarr view, where one row is not larger
zarr_chunk_tokens_max: Final = 1 << 16  # of a chunk of its coordinates
ray_task_bytes_max: Final = 256 << 20  # of decoded rows, that one task of Ray Data reads
ray_tasks_max: Final = 100_000  # that a dataset is read by
map_positions_max: Final = 1 << 12
map_numbers_max: Final = 1 << 28  # that are read for one map
map_direction_bytes_max: Final = 32 * 1024 * 1024
wait_timeout_s_max: Final = 120
header_missing_bytes_max: Final = 4096
request_body_bytes_max: Final = 32 * 1024 * 1024
request_values_max: Final = 1 << 22  # of JSON in a body, by its commas and brackets: some tenths of a second to parse
captures_page_max: Final = 1000
captures_scan_max: Final = 20_000  # looked at for one page, where filters leave some out
filter_tags_max: Final = 16
filter_chars_max: Final = 256
followers_max: Final = 512  # streams of events at a time
watched_max: Final = 64  # names of captures in one of them; captures × sites whose rows it tells
live_event_bytes_max: Final = 1 << 20  # of rows in one event, where one row is not larger
inline_bytes_max: Final = 16 << 20  # of arrays in the answer to a generation
answer_scores_max: Final = 1 << 16  # numbers of probes in the answer to a generation
score_lists_max: Final = 4096  # of a generation: captures × probes
score_lists_streamed_max: Final = 64  # of which so many come with the tokens of a stream

# Who may ask, and how much at once; of each key.
keys_max: Final = 1024
requests_in_flight_max: Final = 1024
connections_max: Final = 4096  # of all together
generations_in_flight_max: Final = 512
