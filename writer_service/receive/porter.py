"""The porter: a process before the writer's sockets that lets in no more connections than the writer has room for.

ZeroMQ accepts every connection, and ends the process when no descriptor is left. So strangers never come to it: the
porter accepts, counts, and carries bytes between each connection and one of its own to the writer.
 - A *stranger* is a connection whose handshake has not ended. Their number is limited for each peer and in all, and so
   is their time. One more than a peer's limit turns another of that peer away, by lot. One more than the limit in all
   turns another one away, by lot, of the peer that has most. Who says nothing never reaches the writer.
 - Of those that have shown a key no peer on another host has more than its part.
 - A connection counts until the writer's end of it is known to be closed: the bound holds at every moment.

The porter needs the standard library alone, and ends when the writer does: it sees the end of ``control``. Where the
writer is killed the system kills the porter, since one that stands still would keep the port and connections. Every
round of its loop is counted where the writer sees it: a porter that goes round no more is killed and started anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

ROOM_FULL, HANDSHAKES, LATE, PEER_FULL = range(4)  # why a connection was refused: places in the shared counts
COUNTS = ("full", "handshakes", "late", "peer")
BEAT = len(COUNTS)  # the place behind them: rounds of the loop, by which the writer sees that it goes round
SHARED_BYTES = 8 * (len(COUNTS) + 1)
READY = b"\x05READY"
_READY_AT = 2  # behind the flags and the length of its frame
_IPV4_MAPPED = b"\0" * 10 + b"\xff\xff"
_AT_ONCE = 16  # accepted before those who are inside have their turn again
_BUFFER = 1 << 20
_PAUSE_S = 0.1
_IDLE_S = 0.5  # between two rounds where nothing comes: twice as often as the writer looks
_LEAVE_S = 1.0
_PR_SET_PDEATHSIG = 1
_LASTING = ((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000))  # a host that is dead gives its place back


@dataclass(slots=True, eq=False)
class Door:
    """A place at which connections come in. ``greeting``: bytes that the writer says before it says READY."""

    listener: socket.socket
    inner: str  # path of the writer's own socket
    greeting: int
    most: int  # connections to the writer
    strangers_max: int
    strangers_peer_max: int
    known_peer_max: int
    strangers: dict[object, list[Guest]] = field(default_factory=dict)  # by peer
    known: dict[object, int] = field(default_factory=dict)  # by peer, how many of those held have shown their key
    held: int = 0  # connections to the writer that it may not have closed yet


@dataclass(slots=True, eq=False)
class Guest:
    """A connection; ``to_inner`` and ``to_client`` are bytes that found no room yet."""

    door: Door
    peer: object
    client: socket.socket | None  # None: it has gone, or was turned away
    since: float
    inner: socket.socket | None = None  # None: it has not said anything yet
    stranger: bool = True
    known: bool = False  # it has shown its key
    said: bytes = b""  # the beginning of what the writer said to it
    to_inner: bytes = b""
    to_client: bytes = b""
    ending: bool = False  # nothing more comes of the client
    shut: bool = False  # and the writer was told so


class Porter:
    """One loop over all connections."""

    def __init__(self, doors: list[Door], control: int, counts: mmap.mmap, handshake_s: float) -> None:
        self._doors = {door.listener.fileno(): door for door in doors}
        self._control, self._counts, self._handshake_s = control, counts, handshake_s
        self._guests: dict[int, Guest] = {}  # by descriptor, of both ends
        self._masks: dict[int, int] = {}
        self._buffer = memoryview(bytearray(_BUFFER))
        self._epoll = select.epoll()
        self._epoll.register(control, select.EPOLLIN)
        for fd in self._doors:
            self._epoll.register(fd, select.EPOLLIN)
        self._paused = 0.0  # until when nobody is accepted; 0 for not at all

    def run(self) -> None:
        """Pass bytes on until the writer has gone, and what it said last is out."""
        until, swept = float("inf"), time.monotonic()
        while time.monotonic() < until and (self._doors or self._guests):
            self._count(BEAT)
            come = []
            for fd, _ in self._epoll.poll(_PAUSE_S if self._paused or not self._doors else _IDLE_S):
                if fd in self._guests:
                    self._carry(fd, self._guests[fd])
                elif fd in self._doors:
                    come.append(self._doors[fd])
                elif fd == self._control:
                    self._close_doors()
                    until = time.monotonic() + _LEAVE_S
            for door in come:  # last: a descriptor that was closed before may be theirs now
                if door.listener.fileno() in self._doors:
                    self._accept(door)
            now = time.monotonic()
            if self._paused and now > self._paused:
                self._pause(0.0)
            if now - swept > 1.0:
                swept = now
                self._turn_away_late(now)

    # ── who comes ───────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, door: Door) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, address = door.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # the system has no more memory or files: those who wait go on waiting
                self._pause(time.monotonic() + _PAUSE_S)
                return
            client.setblocking(False)
            if client.family == socket.AF_UNIX:
                peer: object = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            else:
                peer = peer_of(client.family, address[0])
                for option in _LASTING:
                    client.setsockopt(*option)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._make_room(door, peer)
            guest = Guest(door, peer, client, time.monotonic())
            door.strangers.setdefault(peer, []).append(guest)
            self._guests[client.fileno()] = guest
            self._watch(guest)

    def _make_room(self, door: Door, peer: object) -> None:
        strangers = door.strangers.get(peer, [])
        if len(strangers) >= door.strangers_peer_max:
            self._turn_away(random.choice(strangers), HANDSHAKES)
        elif sum(map(len, door.strangers.values())) >= door.strangers_max:
            self._turn_away(crowded(door), HANDSHAKES)

    def _turn_away(self, guest: Guest, why: int) -> None:
        self._count(why)
        guest.to_inner = b""
        self._client_gone(guest)

    def _turn_away_late(self, now: float) -> None:
        for door in self._doors.values():
            for guest in [one for many in door.strangers.values() for one in many]:
                if now - guest.since > self._handshake_s:
                    self._turn_away(guest, LATE)

    def _known(self, guest: Guest) -> None:
        """It is no stranger any more, or no guest."""
        if guest.stranger:
            guest.stranger = False
            strangers = guest.door.strangers[guest.peer]
            strangers.remove(guest)
            if not strangers:
                del guest.door.strangers[guest.peer]

    def _enter(self, guest: Guest) -> bool:
        """Connect it to the writer, where there is room."""
        if guest.door.held < guest.door.most:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            inner.setblocking(False)
            try:
                inner.connect(guest.door.inner)
            except OSError:  # the writer does not get round to it, or has gone
                inner.close()
            else:
                guest.inner = inner
                guest.door.held += 1
                self._guests[inner.fileno()] = guest
                return True
        self._turn_away(guest, ROOM_FULL)
        return False

    def _count(self, place: int) -> None:
        """Add one in the shared counts."""
        counted = struct.unpack_from("<Q", self._counts, 8 * place)[0]
        struct.pack_into("<Q", self._counts, 8 * place, counted + 1)

    def _pause(self, until: float) -> None:
        self._paused = until
        for fd in self._doors:
            self._epoll.modify(fd, 0 if until else select.EPOLLIN)

    def _close_doors(self) -> None:
        self._epoll.unregister(self._control)
        for fd, door in self._doors.items():
            self._epoll.unregister(fd)
            door.listener.close()
        self._doors.clear()

    # ── what they say ───────────────────────────────────────────────────────────────────────────────────────────

    def _carry(self, fd: int, guest: Guest) -> None:
        try:
            if guest.client is not None and fd == guest.client.fileno():
                self._from_client(guest)
            else:
                self._from_inner(guest)
        except OSError:  # of the writer's end
            self._end(guest)
            return
        self._watch(guest)

    def _from_client(self, guest: Guest) -> None:
        assert guest.client is not None
        try:
            if guest.to_client:
                guest.to_client = _send(guest.client, guest.to_client)
            nbytes = 1 if guest.to_inner else guest.client.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            nbytes = 0
        if not nbytes:
            self._client_gone(guest)
        elif not guest.to_inner and (guest.inner is not None or self._enter(guest)):
            assert guest.inner is not None
            guest.to_inner = _send(guest.inner, self._buffer[:nbytes])

    def _from_inner(self, guest: Guest) -> None:
        assert guest.inner is not None
        if guest.to_inner:
            guest.to_inner = _send(guest.inner, guest.to_inner)
        if guest.to_client:
            return
        try:
            nbytes = guest.inner.recv_into(self._buffer)
        except BlockingIOError:
            return
        if not nbytes:
            self._end(guest)
            return
        if guest.stranger:
            self._hear(guest, bytes(self._buffer[:nbytes]))
        if guest.client is not None:
            try:
                guest.to_client = _send(guest.client, self._buffer[:nbytes])
            except OSError:
                self._client_gone(guest)

    def _hear(self, guest: Guest, data: bytes) -> None:
        """READY is the last that the writer says of a handshake, and nobody hears it who has no key."""
        at = guest.door.greeting + _READY_AT
        guest.said = (guest.said + data)[: at + len(READY)]
        if len(guest.said) == at + len(READY):
            if guest.said.endswith(READY):
                self._welcome(guest)
            guest.said = guest.said[:at]

    def _welcome(self, guest: Guest) -> None:
        """It has a key: let it stay, where its peer has not too many."""
        held = guest.door.known.get(guest.peer, 0)
        if held >= guest.door.known_peer_max:
            self._turn_away(guest, PEER_FULL)
            return
        self._known(guest)
        guest.known = True
        guest.door.known[guest.peer] = held + 1

    def _client_gone(self, guest: Guest) -> None:
        self._known(guest)
        if guest.client is not None:
            self._forget(guest.client)
            guest.client, guest.to_client, guest.ending = None, b"", True
        self._watch(guest)

    def _end(self, guest: Guest) -> None:
        """The writer closed its end."""
        self._known(guest)
        if guest.client is not None:
            if guest.to_client:
                with contextlib.suppress(OSError):
                    guest.client.send(guest.to_client)
            self._forget(guest.client)
        if guest.inner is not None:
            self._forget(guest.inner)
            guest.door.held -= 1
            if guest.known:
                guest.known = False
                guest.door.known[guest.peer] -= 1
                if not guest.door.known[guest.peer]:
                    del guest.door.known[guest.peer]
        guest.client = guest.inner = None

    def _forget(self, end: socket.socket) -> None:
        fd = end.fileno()
        if self._masks.pop(fd, 0):
            self._epoll.unregister(fd)
        self._guests.pop(fd, None)
        end.close()

    def _watch(self, guest: Guest) -> None:
        """Wake for what can be done with it: nothing is read that finds no room."""
        if guest.client is not None:
            self._mask(guest.client, (0 if guest.to_inner else select.EPOLLIN)
                       | (select.EPOLLOUT if guest.to_client else 0))
        if guest.inner is not None:
            if guest.ending and not guest.to_inner and not guest.shut:
                guest.shut = True  # it closes its end now
                with contextlib.suppress(OSError):
                    guest.inner.shutdown(socket.SHUT_WR)
            self._mask(guest.inner, (0 if guest.to_client else select.EPOLLIN)
                       | (select.EPOLLOUT if guest.to_inner else 0))

    def _mask(self, end: socket.socket, mask: int) -> None:
        fd = end.fileno()
        before = self._masks.pop(fd, 0)
        if mask:
            self._masks[fd] = mask
            if mask != before:
                (self._epoll.modify if before else self._epoll.register)(fd, mask)
        elif before:  # a mask of 0 would still wake us for its end
            self._epoll.unregister(fd)


def peer_of(family: int, host: str) -> object:
    """Whom a connection counts for: an address, or a network of IPv6, since one host has all addresses of it."""
    if family != socket.AF_INET6:
        return host
    host, _, scope = host.partition("%")
    packed = socket.inet_pton(socket.AF_INET6, host)
    return packed if packed.startswith(_IPV4_MAPPED) else (packed[:8], scope)


def crowded(door: Door) -> Guest:
    """A stranger of one of the peers that have most, by lot."""
    most = max(map(len, door.strangers.values()))
    return random.choice([one for many in door.strangers.values() if len(many) == most for one in many])


def _send(sink: socket.socket, data: bytes | memoryview) -> bytes:
    """Send what finds room; what does not."""
    try:
        sent = sink.send(data)
    except BlockingIOError:
        sent = 0
    return b"" if sent == len(data) else bytes(data[sent:])


def main() -> None:
    """The task is JSON in the first argument; every descriptor in it was made by the writer."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the writer
        signal.signal(number, signal.SIG_IGN)
    task = json.loads(sys.argv[1])
    doors = [Door(socket.socket(fileno=fd), *rest) for fd, *rest in task["doors"]]
    counts = mmap.mmap(task["counts"], SHARED_BYTES)
    os.close(task["counts"])
    Porter(doors, task["control"], counts, task["handshake_s"]).run()


if __name__ == "__main__":
    main()
