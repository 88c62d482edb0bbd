"""The sockets that senders come to: one of this host, and one of the network where it is asked for."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket as sockets
import time
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from schemas import limits
from schemas.checks import check_can_listen
from schemas.errors import StartError
from schemas.wire.curve import check_writer, secure_writer
from writer_service.config import Config
from writer_service.receive.porter_process import (
    CURVE_GREETING,
    NULL_GREETING,
    PorterProcess,
    Shares,
    Threshold,
    shares_of,
)

__all__ = ["Sockets", "check_sockets", "is_remote"]

receive_at_once: Final = 64
parts_max: Final = 2 + limits.frame_bytes_max // 4096
_message_bytes_max: Final = limits.frame_bytes_max + 2 * limits.message_header_bytes_max
_LOCAL: Final = b"h"
_REMOTE: Final = b"n"
_WAITING_MAX: Final = 1024  # connections that nobody has accepted yet
_LINGER_MS: Final = 200  # answers are still sent at the end
_PORTER_GONE_S: Final = 2.0  # a killed writer's porter lives a moment longer, and has its port


def is_remote(address: bytes) -> bool:
    """Whether a sender is on another host: it shares no memory, and speaks for an engine alone."""
    return address.startswith(_REMOTE)


def check_sockets(config: Config) -> None:
    """StartError where the sockets could not be opened, before anything is touched: makes and keeps nothing."""
    if (path := _path(config.endpoint)).parent.exists():
        _check_place(path)
    if config.curve is not None:
        check_writer(config.curve)
    if config.metrics_port:
        check_can_listen(config.metrics_host, config.metrics_port, "--metrics-port")
    _shares()
    if at := _numeric(config.listen):
        until = time.monotonic() + _PORTER_GONE_S
        while True:
            try:
                return check_can_listen(*at, "--listen")
            except StartError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)


def _shares() -> Shares:
    return shares_of(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _numeric(listen: str) -> tuple[str, int] | None:
    """Host and port of an address that is numbers, or ``*``; names of interfaces are for ZeroMQ to find."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:
        return None


class Sockets:
    """Messages in and answers out; a sender's address is its connection's name behind a letter for its socket."""

    def __init__(self, context: zmq.Context[Any], config: Config) -> None:
        self.shares = _shares()
        self._path = _path(config.endpoint)
        self._sockets: dict[bytes, zmq.Socket[bytes]] = {}
        self._turn: list[bytes] = []
        self._listeners: list[sockets.socket] = []
        self._authenticator: ThreadAuthenticator | None = None
        self._porter: PorterProcess | None = None
        try:
            self._open(context, config)
        except BaseException:
            self.close()
            raise

    def _open(self, context: zmq.Context[Any], config: Config) -> None:
        local = _local(context, self._path, "--endpoint", config.endpoint)
        self._sockets[_LOCAL] = local
        self._listeners.append(_listener("--endpoint", config.endpoint, sockets.AF_UNIX, str(self._path)))
        thresholds = [Threshold(self._listeners[0], _inner(self._path, _LOCAL), NULL_GREETING, self.shares.local,
                                self.shares.local)]
        if config.listen:
            assert config.curve is not None
            self._authenticator = ThreadAuthenticator(context)
            self._authenticator.start()
            self._sockets[_REMOTE] = _remote(context, self._path, config.curve, self._authenticator)
            at = _numeric(config.listen) or _numeric(_looked_up(context, config.listen))
            assert at is not None
            family = sockets.AF_INET6 if ":" in at[0] else sockets.AF_INET
            self._listeners.append(_listener("--listen", config.listen, family, at))
            thresholds.append(Threshold(self._listeners[1], _inner(self._path, _REMOTE), CURVE_GREETING,
                                        self.shares.remote, self.shares.remote_peer))
        self._turn = list(self._sockets)
        self._porter = PorterProcess(thresholds)

    @property
    def refused(self) -> dict[str, int]:
        """Connections that were refused, by reason."""
        return {} if self._porter is None else self._porter.refused

    def look(self, now: float) -> float:
        """Have connections accepted again where that has ended; seconds for which nobody could be heard."""
        return 0.0 if self._porter is None else self._porter.look(now)

    def poll_on(self, poller: zmq.Poller, listening: bool) -> None:
        """Let a poller wake for what comes, or not."""
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN if listening else 0)

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """A message that is waiting, with its sender's address; from each socket in turn."""
        for letter in self._turn:
            socket = self._sockets[letter]
            try:
                name = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                continue
            self._turn.remove(letter)
            self._turn.append(letter)
            parts: list[zmq.Frame] = []
            size, more = 0, bool(socket.getsockopt(zmq.RCVMORE))
            while more:
                part = socket.recv(copy=False)
                size, more = size + len(part), part.more
                if len(parts) < parts_max and size <= _message_bytes_max:
                    parts.append(part)
            return letter + name, parts
        return None

    def send(self, address: bytes, data: bytes) -> None:
        """An answer; lost where the sender's queue is full: Acks are cumulative and come again with a Ping."""
        with contextlib.suppress(zmq.Again):
            self._sockets[address[:1]].send_multipart([address[1:], data], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets; answers are still sent, for a moment. The paths stay: another writer may have them."""
        for listener in self._listeners:
            listener.close()
        for socket in self._sockets.values():
            socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()

    def leave(self) -> None:
        """Let the porter go, after the context was ended: it has all answers now."""
        if self._porter is not None:
            self._porter.close()


def _router(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    # Before it is bound: the end of a peer that left answers unread takes the value of then, and -1 waits for ever.
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_header_bytes_max)
    socket.setsockopt(zmq.RCVHWM, receive_at_once)
    socket.setsockopt(zmq.SNDHWM, 1024)
    socket.setsockopt(zmq.HANDSHAKE_IVL, limits.handshake_ms)
    socket.setsockopt(zmq.BACKLOG, _WAITING_MAX)
    return socket


def _inner(path: Path, letter: bytes) -> Path:
    """Path of the writer's own socket, behind the one that others know."""
    return path.with_name(f"{path.name}~{letter.decode()}")


def _local(context: zmq.Context[Any], path: Path, flag: str, endpoint: str) -> zmq.Socket[bytes]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_place(path)
    path.unlink(missing_ok=True)  # of a writer that was killed; the lock says that none lives
    return _bound(_router(context), path, _LOCAL, flag, endpoint)


def _path(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def _check_place(path: Path) -> None:
    info = path.parent.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise StartError(f"--endpoint: {path.parent} has mode {info.st_mode & 0o777:04o}, and must belong to this user "
                         "alone (mode 0700); name a folder that does not exist yet, and the writer makes it")
    if path.exists() and not path.is_socket():
        raise StartError(f"--endpoint: {path} exists and is not a socket; name another path")


def _remote(context: zmq.Context[Any], path: Path, curve: Path, authenticator: ThreadAuthenticator
            ) -> zmq.Socket[bytes]:
    socket = _router(context)
    socket.setsockopt(zmq.RCVHWM, 4)  # of payload itself, up to a frame each
    try:
        authenticator.configure_curve(domain="*", location=str(secure_writer(socket, curve)))
    except StartError:
        socket.close(linger=0)
        raise
    return _bound(socket, path, _REMOTE, "--listen", "")


def _bound(socket: zmq.Socket[bytes], path: Path, letter: bytes, flag: str, endpoint: str) -> zmq.Socket[bytes]:
    inner = _inner(path, letter)
    inner.unlink(missing_ok=True)
    try:
        socket.bind(f"ipc://{inner}")
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise StartError(f"{flag} = {endpoint!r}: {error}") from None
    return socket


def _looked_up(context: zmq.Context[Any], listen: str) -> str:
    """An address that names an interface, in numbers: ZeroMQ knows, for a moment and on some port."""
    host, _, port = listen.rpartition(":")
    with context.socket(zmq.ROUTER) as probe:
        try:
            probe.bind(f"{host}:*")
            found = probe.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[0]
        except zmq.ZMQError as error:
            raise StartError(f"--listen = {listen!r}: {error}") from None
    if _numeric(f"{found}:{port}") is None:
        raise StartError(f"--listen = {listen!r}: must be tcp://HOST:PORT")
    return f"{found}:{port}"


def _listener(flag: str, endpoint: str, family: sockets.AddressFamily, address: Any) -> sockets.socket:
    listener = sockets.socket(family, sockets.SOCK_STREAM)
    try:
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_WAITING_MAX)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise StartError(f"{flag} = {endpoint!r}: {error.strerror or error}") from None
    return listener
