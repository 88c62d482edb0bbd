"""The tables of the catalog.

These tables are there beside what readers need:
 - strays: the places of rows that are never served.
 - doomed: the captures whose rows in a segment are to be erased.
 - log_refs: the control logs that tell something of a capture.
 - scrub: the control logs that are to forget a capture.
 - owners: the bytes of each owner. Triggers keep them right, whatever changes extents or captures.

A capture never changes its owner. The column ``beside`` is the bytes that a capture has beside its rows. Its
records, index and names are taken to be CAPTURE_BYTES; the fields whose size the caller chose are counted.

A capture of an engine on several ranks has a row in parts for each rank that joined, beside the leading one
(schemas.wire.layout). Rows and drops are those of the part that sent them. A drop of EVERY_PART is one of all parts.
Ranks whose senders are gone while others of their group go on are in lost_ranks.
"""

from __future__ import annotations

from typing import Final

__all__ = ["CAPTURE_BYTES", "CATALOG_VERSION", "DDL", "EVERY_PART"]

CATALOG_VERSION: Final = 13
CAPTURE_BYTES: Final = 1024
EVERY_PART: Final = -1  # in drops
DDL: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE streams (
    stream TEXT PRIMARY KEY, epoch INTEGER NOT NULL, role TEXT NOT NULL, covered INTEGER NOT NULL,
    bye INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE engines (
    stream TEXT PRIMARY KEY, epoch INTEGER NOT NULL, rank INTEGER NOT NULL, shard INTEGER NOT NULL, info TEXT NOT NULL,
    "group" TEXT NOT NULL DEFAULT ''
);
CREATE TABLE lost_ranks ("group" TEXT NOT NULL, rank INTEGER NOT NULL, PRIMARY KEY ("group", rank)) WITHOUT ROWID;
CREATE TABLE captures (
    id TEXT PRIMARY KEY, ulid TEXT NOT NULL, sample INTEGER NOT NULL,
    owner TEXT NOT NULL DEFAULT '', status TEXT NOT NULL, created_ms INTEGER NOT NULL,
    tags TEXT NOT NULL DEFAULT '{{}}',
    own_stream TEXT, own_seq INTEGER,
    stream TEXT, epoch INTEGER, request TEXT, open_seq INTEGER, asked TEXT, resolved TEXT,
    adapter TEXT NOT NULL DEFAULT '', edits TEXT NOT NULL DEFAULT '',
    prompt_len INTEGER NOT NULL DEFAULT 0, prompt_tokens BLOB NOT NULL DEFAULT x'', cached INTEGER NOT NULL DEFAULT 0,
    finish_seq INTEGER, finish_reason TEXT, stop_reason TEXT, output_tokens BLOB NOT NULL DEFAULT x'',
    "end" INTEGER, recomputed INTEGER NOT NULL DEFAULT 0, client_reason TEXT, client_stop TEXT,
    client_tokens BLOB NOT NULL DEFAULT x'',
    total_len INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0, failed TEXT, deleted INTEGER NOT NULL DEFAULT 0, hold INTEGER NOT NULL DEFAULT 0,
    quota INTEGER NOT NULL DEFAULT 0, "group" TEXT NOT NULL DEFAULT '',
    beside INTEGER GENERATED ALWAYS AS (CASE WHEN deleted THEN 0 ELSE {CAPTURE_BYTES} + length(CAST(tags AS BLOB))
        + coalesce(length(CAST(asked AS BLOB)), 0) + length(prompt_tokens) + length(output_tokens)
        + length(client_tokens) END) VIRTUAL
);
CREATE INDEX captures_ulid ON captures (ulid);
CREATE INDEX captures_created ON captures (created_ms, id) WHERE deleted = 0;
CREATE INDEX captures_owner ON captures (owner, created_ms, id) WHERE deleted = 0;
CREATE INDEX captures_status ON captures (status, created_ms, id);
CREATE INDEX captures_owner_status ON captures (owner, status, created_ms, id);
CREATE INDEX captures_may_expire ON captures (created_ms) WHERE deleted = 0 AND hold = 0;
CREATE INDEX captures_open ON captures (stream) WHERE finish_seq IS NULL;
CREATE INDEX captures_in_parts ON captures (id) WHERE "group" <> '' AND status = 'running';
CREATE TABLE parts (
    capture TEXT NOT NULL, part INTEGER NOT NULL, stream TEXT NOT NULL, epoch INTEGER NOT NULL,
    open_seq INTEGER NOT NULL, finish_seq INTEGER, lost INTEGER NOT NULL DEFAULT 0, edits TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (capture, part)
) WITHOUT ROWID;
CREATE INDEX parts_open ON parts (stream) WHERE finish_seq IS NULL;
CREATE TABLE aliases (
    n INTEGER PRIMARY KEY AUTOINCREMENT, alias TEXT NOT NULL, owner TEXT NOT NULL, ulid TEXT NOT NULL
);
CREATE INDEX aliases_alias ON aliases (alias, n);
CREATE INDEX aliases_ulid ON aliases (ulid);
CREATE TABLE segments (
    number INTEGER PRIMARY KEY, sealed INTEGER NOT NULL, site TEXT NOT NULL, codec TEXT NOT NULL, dtype TEXT NOT NULL,
    width INTEGER NOT NULL, fingerprint TEXT NOT NULL, main TEXT NOT NULL, cold INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE frames (
    stream TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, segment INTEGER NOT NULL,
    offset INTEGER NOT NULL, bytes INTEGER NOT NULL, covered INTEGER NOT NULL, PRIMARY KEY (stream, epoch, seq)
) WITHOUT ROWID;
CREATE INDEX frames_segment ON frames (segment, offset);
CREATE TABLE extents (
    capture TEXT NOT NULL, site TEXT NOT NULL, part INTEGER NOT NULL, seq INTEGER NOT NULL, segment INTEGER NOT NULL,
    offset INTEGER NOT NULL, n INTEGER NOT NULL, pos_min INTEGER NOT NULL, pos_max INTEGER NOT NULL,
    layers BLOB NOT NULL, rows BLOB NOT NULL, steps BLOB NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (capture, site, part, seq)
) WITHOUT ROWID;
CREATE INDEX extents_segment ON extents (segment, offset);
CREATE TABLE owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER owners_new AFTER INSERT ON captures WHEN new.owner <> '' BEGIN
    INSERT INTO owners SELECT new.owner, 0 WHERE NOT EXISTS (SELECT 1 FROM owners WHERE owner = new.owner);
    UPDATE owners SET bytes = bytes + new.beside WHERE owner = new.owner;
END;
CREATE TRIGGER owners_changed AFTER UPDATE OF deleted, tags, asked, prompt_tokens, output_tokens, client_tokens
ON captures WHEN new.owner <> '' AND new.beside <> old.beside BEGIN
    UPDATE owners SET bytes = bytes + new.beside - old.beside WHERE owner = new.owner;
END;
CREATE TRIGGER owners_more AFTER INSERT ON extents BEGIN
    UPDATE owners SET bytes = bytes + new.bytes WHERE owner = (SELECT owner FROM captures WHERE id = new.capture);
END;
CREATE TRIGGER owners_less AFTER DELETE ON extents BEGIN
    UPDATE owners SET bytes = bytes - old.bytes WHERE owner = (SELECT owner FROM captures WHERE id = old.capture);
END;
CREATE TABLE strays (
    capture TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, PRIMARY KEY (capture, segment, offset)
) WITHOUT ROWID;
CREATE TABLE doomed (
    segment INTEGER NOT NULL, capture TEXT NOT NULL, PRIMARY KEY (segment, capture)
) WITHOUT ROWID;
CREATE TABLE log_refs (capture TEXT NOT NULL, log INTEGER NOT NULL, PRIMARY KEY (capture, log)) WITHOUT ROWID;
CREATE TABLE scrub (log INTEGER NOT NULL, capture TEXT NOT NULL, PRIMARY KEY (log, capture)) WITHOUT ROWID;
CREATE TABLE drops (
    capture TEXT NOT NULL, site TEXT NOT NULL, part INTEGER NOT NULL, seq INTEGER NOT NULL, layers BLOB NOT NULL,
    start INTEGER NOT NULL, stop INTEGER NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (capture, site, part, seq)
) WITHOUT ROWID;
"""
