"""Every named maximum, with its unit last. Sizes are checked against these before memory is taken."""

from typing import Final

PROTOCOL_VERSION: Final = 2  # of messages between engine and writer
STORE_VERSION: Final = 2  # stores of earlier versions are read, and continued in this version

# What a caller may ask for.
spec_json_bytes_max: Final = 64 * 1024  # of one request's `capture`
spec_sites_max: Final = 4096  # sites in one spec
spec_intervals_max: Final = 4096  # ranges of positions in one spec
spec_tags_max: Final = 64  # tags of one capture
tag_key_chars_max: Final = 64  # characters of a tag's key
tag_value_chars_max: Final = 512  # characters of a tag's value
capture_samples_max: Final = 4096  # captures of one request (prompts × `n`)
edits_max: Final = 8  # edits of one request, not counting those with rows for single positions
edits_of_rows_max: Final = 1024  # all edits of one request; rows of a capture count as one edit for each layer
edit_intervals_max: Final = 64  # ranges of positions in one edit
edit_json_bytes_max: Final = 4 * 1024 * 1024  # of one request's `edit`
edit_depth_max: Final = 8  # edits of one row at one site and layer
edit_heads_max: Final = 256  # heads that one edit names
edit_rows_max: Final = 65_536  # rows that requests of one engine set at a time
alias_chars_max: Final = 256  # characters of a capture's name
position_max: Final = 2**31 - 1  # position of a token
probes_max: Final = 64  # probes of one engine
probe_scores_max: Final = 1024  # scores of one probe
probe_name_chars_max: Final = 64  # characters of a probe's name
probe_file_bytes_max: Final = 64 * 1024 * 1024  # of a probe's file, and of a vector's
vectors_max: Final = 1024  # vectors that one key has stored
vectors_bytes_max: Final = 256 * 1024 * 1024  # of one key's stored vectors
vector_width_max: Final = 1 << 19  # numbers of a stored vector; as base64 they fit edit_json_bytes_max
vector_body_bytes_max: Final = 32 * 1024 * 1024  # of a request that stores a vector
engines_max: Final = 64  # engines behind one gateway
layers_max: Final = 1024  # layers of a model
width_max: Final = 1 << 20  # numbers of a row
parts_max: Final = 1024  # ranks of one engine that send rows
layout_places_max: Final = 1 << 18  # ranks × their sites × layers

# Messages between engine, writer and service.
message_header_bytes_max: Final = 16 * 1024 * 1024  # of a frame's header, or of a control record
frame_bytes_target: Final = 8 * 1024 * 1024  # a frame is sent once it has this many bytes
encode_bytes_max: Final = 64 * 1024 * 1024  # of float32 rows that are encoded at a time
frame_delay_ms: Final = 50  # a frame that is not full is sent after this time
frame_bytes_max: Final = 512 * 1024 * 1024  # of one frame
frame_rows_max: Final = 1 << 20  # rows of one frame
frame_captures_max: Final = 1 << 16  # captures in one frame
frame_runs_max: Final = 1 << 16  # runs of consecutive positions in one frame
payload_part_bytes: Final = 4 * 1024 * 1024  # of one part of a message over TCP
payload_window_bytes_max: Final = 256 * 1024 * 1024  # sent and not yet acknowledged over TCP
records_pending_bytes_max: Final = 128 * 1024 * 1024  # of an engine's control records; beyond this it captures nothing
sender_window_frames_max: Final = 1024  # messages in a sender's queue
heartbeat_interval_ms: Final = 1000  # between signs of life of an idle connection
engine_lost_after_ms: Final = 15_000  # of silence, after which the writer takes an engine for lost
control_records_pending_max: Final = 4096  # control records of one process that wait for an answer
control_submit_timeout_ms: Final = 5000  # that a request waits for the writer's answer
handshake_ms: Final = 5000  # that a new connection has to show its key
handshakes_max: Final = 256  # unfinished handshakes at one socket of the writer
handshakes_peer_max: Final = 64  # unfinished handshakes of one address, or of one process on this host
connections_local_max: Final = 4096  # connections of this host to the writer; fewer if its limit of open files is low
connections_remote_max: Final = 2048  # connections of other hosts to the writer
connections_peer_max: Final = 512  # connections of one other address; at most a quarter of all
descriptors_reserved: Final = 256  # descriptors that the writer keeps for its own files

# The store on disk.
section_align_bytes: Final = 4096  # streams in a segment begin at multiples of this
segment_bytes_target: Final = 256 * 1024 * 1024  # a segment is sealed at this size
commit_bytes_target: Final = 32 * 1024 * 1024  # bytes that start a commit
commit_delay_ms: Final = 50  # from the first waiting byte to a commit

# A store in a bucket.
bucket_head_bytes_max: Final = 64 * 1024  # of the head, which says what the prefix holds
bucket_known_heads_max: Final = 1024  # pushed heads that a store's folder remembers, the latest
bucket_known_bytes_max: Final = 8 * 1024 * 1024  # of the file that remembers them
bucket_shown_max: Final = 1000  # lost captures, and foreign objects, in a report
bucket_epoch_max: Final = 10**9  # number of a push
bucket_index_bytes_max: Final = 512 * 1024 * 1024  # of a block's small arrays
bucket_index_sides_bytes: Final = 16 * 1024 * 1024  # of side arrays within the index, which need no request
bucket_catalog_bytes_max: Final = 64 << 30  # of the catalog, unpacked
bucket_chunk_bytes: Final = 256 * 1024  # of a chunk of rows in a reader's cache
bucket_request_bytes_max: Final = 8 * 1024 * 1024  # of neighbouring chunks in one request
bucket_batch_bytes: Final = 64 * 1024 * 1024  # of chunks in memory at a time
bucket_cache_bytes_min: Final = 16 * 1024 * 1024  # smallest cache of a reader
bucket_cache_bytes: Final = 4 << 30  # a reader's cache by default
stores_max: Final = 128  # stores that are read as one; also the folders below URL/* among which they are

# What a reader may ask for.
slice_bytes_max: Final = 1 << 30  # of one slice
attention_bytes_max: Final = 64 * 1024 * 1024  # of attention weights that are computed at a time
attention_weights_max: Final = (1 << 26) + (1 << 16)  # weights of one request: about ten seconds of one core
attention_heads_max: Final = 1 << 10  # heads that one request names
slices_in_flight_bytes_max: Final = 2 << 30  # of slices that one service sends at a time
slice_ranges_max: Final = 256  # positions and ranges that one slice names
slice_json_numbers_max: Final = 1 << 18  # numbers of a slice in JSON
zarr_chunk_bytes_target: Final = 4 << 20  # of a chunk of rows in the Zarr view; one row if that is larger
zarr_chunk_tokens_max: Final = 1 << 16  # tokens in a chunk of its coordinates
ray_task_bytes_max: Final = 256 << 20  # of decoded rows that one task of Ray Data reads
ray_tasks_max: Final = 100_000  # tasks that read one dataset
map_positions_max: Final = 1 << 12  # positions of one map
map_numbers_max: Final = 1 << 28  # numbers that are read for one map
map_direction_bytes_max: Final = 32 * 1024 * 1024  # of the direction that a map is computed along
wait_timeout_s_max: Final = 120  # that a request may wait for the end of a capture
header_missing_bytes_max: Final = 4096  # of missing positions in a slice's header
request_body_bytes_max: Final = 32 * 1024 * 1024  # of a request's body
request_values_max: Final = 1 << 22  # JSON values of a body (commas and brackets)
captures_page_max: Final = 1000  # captures on one page of a list
captures_scan_max: Final = 20_000  # captures that are examined for one page, if filters exclude some
filter_tags_max: Final = 16  # tags of one filter
filter_chars_max: Final = 256  # characters of one filter
followers_max: Final = 512  # streams of events at a time
watched_max: Final = 64  # captures that one stream names; also captures × sites whose rows it sends
live_event_bytes_max: Final = 1 << 20  # of rows in one event; one row if that is larger
inline_bytes_max: Final = 16 << 20  # of arrays in the answer to a generation
answer_scores_max: Final = 1 << 16  # scores in the answer to a generation
score_lists_max: Final = 4096  # lists of scores of a generation: captures × probes
score_lists_streamed_max: Final = 64  # of these lists, the number that comes with the tokens of a stream

# Keys and callers.
keys_max: Final = 1024  # keys of a service
requests_in_flight_max: Final = 1024  # requests of one key at a time
connections_max: Final = 4096  # connections of all callers together
generations_in_flight_max: Final = 512  # generations of one key at a time
