"""A real Postgres server for tests: Debian's, in a folder of its own, on a free port of loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import PATIENCE_S, free_port

BIN = next((path for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
            if (path / "initdb").exists()), None)
NO_POSTGRES = "the catalog was NOT tested in Postgres: there is no server in /usr/lib/postgresql (Debian: postgresql)"
PASSWORD = "s3cret-pass"  # of every role, and in no message


class PostgresServer:
    """A server with a database ``tap``; role ``tap`` owns it, ``reader`` may read what it makes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        # The server refuses to be root's.
        self._as = [] if os.geteuid() else ["setpriv", "--reuid", self._user().pw_name, "--regid",
                                            str(self._user().pw_gid), "--clear-groups"]
        if self._as:
            os.chown(folder, self._user().pw_uid, self._user().pw_gid)
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run("initdb", "-D", f"{folder}/data", "-U", "tap", f"--pwfile={secret}", "-A", "scram-sha-256", "-E",
                  "UTF8", "--locale=C.UTF-8", "--no-sync")
        self.start()
        for statement in ("CREATE DATABASE tap", f"CREATE ROLE reader LOGIN PASSWORD '{PASSWORD}'",
                          f"CREATE ROLE nobody LOGIN PASSWORD '{PASSWORD}'",
                          "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"):
            self.sql(statement, "postgres")

    @staticmethod
    def _user() -> pwd.struct_passwd:
        for name in ("postgres", "nobody"):
            try:
                return pwd.getpwnam(name)
            except KeyError:
                continue
        raise AssertionError("no user to run Postgres as")

    def _run(self, program: str, *arguments: str) -> None:
        assert BIN is not None
        done = subprocess.run([*self._as, str(BIN / program), *arguments], capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert BIN is not None
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self._as, str(BIN / "postgres"), "-D", f"{self.folder}/data", "-p", str(self.port), "-h", "127.0.0.1",
                 "-k", "", "-c", "fsync=off", "-c", "max_connections=40"], stdout=log, stderr=log, cwd="/")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.sql("SELECT 1", "postgres")
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """End it at once: its clients are cut off."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(PATIENCE_S)

    def url(self, database: str = "tap", role: str = "tap") -> str:
        """As a user names it."""
        return f"postgresql://{role}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def sql(self, statement: str, database: str = "tap", arguments: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement, by the server's owner; OSError where it does not answer."""
        import psycopg
        try:
            with psycopg.connect(self.url(database), autocommit=True, connect_timeout=10) as connection:
                found = connection.execute(statement, arguments or None)
                return found.fetchall() if found.description else []
        except psycopg.OperationalError as error:
            raise OSError(str(error)) from None

    def database(self) -> str:
        """The URL of a new, empty one; what role ``tap`` makes there ``reader`` may read."""
        name = f"d{time.monotonic_ns()}"
        self.sql(f"CREATE DATABASE {name}", "postgres")
        for what in ("USAGE ON SCHEMAS", "SELECT ON TABLES"):
            self.sql(f"ALTER DEFAULT PRIVILEGES FOR ROLE tap GRANT {what} TO reader", name)
        return self.url(name)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server."""
    folder = Path(tempfile.mkdtemp(prefix="tap-pg-"))
    server = PostgresServer(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
