"""The sockets that senders come to: one of this host, and one of the network where it is asked for."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from schemas import limits
from schemas.checks import check_can_listen
from schemas.curve import check_writer, secure_writer
from schemas.errors import StartError
from writer_service.config import Config

__all__ = ["Doors", "check_doors", "is_remote"]

receive_at_once: Final = 64
parts_max: Final = 2 + limits.frame_bytes_max // 4096
_message_bytes_max: Final = limits.frame_bytes_max + 2 * limits.message_header_bytes_max
_REMOTE: Final = b"n"


def is_remote(address: bytes) -> bool:
    """Whether a sender is on another host: it shares no memory, and speaks for an engine alone."""
    return address.startswith(_REMOTE)


def check_doors(config: Config) -> None:
    """StartError where the sockets could not be opened, before anything is touched: makes and keeps nothing."""
    if (path := _path(config.endpoint)).parent.exists():
        _check_place(path)
    if config.curve is not None:
        check_writer(config.curve)
    if config.metrics_port:
        check_can_listen(config.metrics_host, config.metrics_port, "--metrics-port")
    if at := _numeric(config.listen):
        check_can_listen(*at, "--listen")


def _numeric(listen: str) -> tuple[str, int] | None:
    """Host and port of an address that is numbers, or ``*``; names of interfaces are for ZeroMQ to find."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:
        return None


class Doors:
    """Messages in and answers out; a sender's address is its connection's name behind a letter for its socket."""

    def __init__(self, context: zmq.Context[Any], config: Config) -> None:
        self._sockets = {b"h": _local(context, config.endpoint)}
        self._authenticator: ThreadAuthenticator | None = None
        if config.listen:
            assert config.curve is not None
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            try:
                self._sockets[_REMOTE] = _remote(context, config.listen, config.curve, self._authenticator)
            except StartError:
                self.close()
                raise
        self._turn = list(self._sockets)

    def poll_on(self, poller: zmq.Poller, listening: bool) -> None:
        """Let a poller wake for what comes, or not."""
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN if listening else 0)

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """A message that is waiting, with its sender's address; from each socket in turn."""
        for door in self._turn:
            socket = self._sockets[door]
            try:
                name = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                continue
            self._turn.remove(door)
            self._turn.append(door)
            parts: list[zmq.Frame] = []
            size, more = 0, bool(socket.getsockopt(zmq.RCVMORE))
            while more:
                part = socket.recv(copy=False)
                size, more = size + len(part), part.more
                if len(parts) < parts_max and size <= _message_bytes_max:
                    parts.append(part)
            return door + name, parts
        return None

    def send(self, address: bytes, data: bytes) -> None:
        """An answer; lost where the sender's queue is full: Acks are cumulative and come again with a Ping."""
        with contextlib.suppress(zmq.Again):
            self._sockets[address[:1]].send_multipart([address[1:], data], zmq.NOBLOCK)

    def close(self) -> None:
        """What was said is still sent, for a moment."""
        for socket in self._sockets.values():
            socket.close(linger=200)
        if self._authenticator is not None:
            self._authenticator.stop()


def _router(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_header_bytes_max)
    socket.setsockopt(zmq.RCVHWM, receive_at_once)
    socket.setsockopt(zmq.SNDHWM, 1024)
    return socket


def _local(context: zmq.Context[Any], endpoint: str) -> zmq.Socket[bytes]:
    path = _path(endpoint)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_place(path)
    path.unlink(missing_ok=True)  # of a writer that was killed; the lock says that none lives
    return _bound(_router(context), "--endpoint", endpoint)


def _path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def _check_place(path: Path) -> None:
    info = path.parent.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise StartError(f"--endpoint: {path.parent} must belong to this user alone (mode 0700); "
                         f"it has mode {info.st_mode & 0o777:04o}; name a folder of its own, which is made")
    if path.exists() and not path.is_socket():
        raise StartError(f"--endpoint: {path} is there and is no socket; name another path")


def _remote(context: zmq.Context[Any], listen: str, curve: Path, authenticator: ThreadAuthenticator
            ) -> zmq.Socket[bytes]:
    socket = _router(context)
    socket.setsockopt(zmq.RCVHWM, 4)  # of payload itself, up to a frame each
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    try:
        authenticator.configure_curve(domain="*", location=str(secure_writer(socket, curve)))
    except StartError:
        socket.close(linger=0)
        raise
    return _bound(socket, "--listen", listen)


def _bound(socket: zmq.Socket[bytes], flag: str, endpoint: str) -> zmq.Socket[bytes]:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise StartError(f"{flag} = {endpoint!r}: {error}") from None
    return socket
