"""A supervisor over three small programs, for tests of process handling: no model, so a start takes a moment.

Usage: supervised.py FOLDER ENGINE_PORT [MODE]. Each program appends its id to FOLDER/NAME.pids. The engine listens on a
port, has a worker process of its own, and with MODE "stubborn" ignores SIGTERM, its worker too; with MODE "loading" it
ignores SIGTERM and never gets ready; with MODE "writer-dies", "engine-fails", "engine-raises" or "engine-refuses" (its
arguments) that program ends by itself. With MODE "pushes" or "push-dies" there is a fourth. Where all that happens is
that a time runs out, the supervisor runs at PACE of its times.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from vllm_tap.serve.child import ServiceCommand
from vllm_tap.serve.supervisor import Supervisor

PACE = 0.4
HEAD = """
import os, signal, subprocess, sys, time
def note(name):
    with open(os.path.join({folder!r}, name + ".pids"), "a") as file:
        file.write(str(os.getpid()) + "\\n")
def linger():
    while True:
        time.sleep(1)
"""
WORKER = "import signal, sys, time\nif sys.argv[1] == 'stubborn': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" \
         "while True: time.sleep(1)"
ENGINE = HEAD + """
note("engine")
if {mode!r} == "engine-fails":
    print("(Worker) ERROR schemas.errors.StartError: vllm-tap: cannot arm q; this model offers: resid_post", flush=True)
    print("\\n".join("  File " + str(number) for number in range(30)) + "\\nno such model", flush=True)
    sys.exit(3)
if {mode!r} == "engine-raises":
    print("(EngineCore pid=7) ERROR 11-23 13:29:01 [core.py:12]   File x, line 3, in check", flush=True)
    print("(EngineCore pid=7) ERROR 11-23 13:29:01 [core.py:12] torch.OutOfMemoryError: no memory for that", flush=True)
    sys.exit("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}")
if {mode!r} == "engine-refuses":
    import argparse
    parser = argparse.ArgumentParser("engine")
    for number in range(99):
        parser.add_argument("--flag" + str(number))
    parser.parse_args(["--bogus"])
if {mode!r} in ("stubborn", "loading"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if {mode!r} == "loading":
    linger()
worker = subprocess.Popen([sys.executable, "-c", {worker!r}, {mode!r}])
with open(os.path.join({folder!r}, "worker.pids"), "a") as file:
    file.write(str(worker.pid) + "\\n")
if {mode!r} != "stubborn":
    def end(*_):
        worker.kill()
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
import http.server
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", {port}), Health).serve_forever()
"""
PLAIN = HEAD + """
note({name!r})
def end(*_):
    with open(os.path.join({folder!r}, "order"), "a") as file:
        file.write({name!r} + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print({name!r} + " ready", flush=True)
if {mode!r} == {name!r} + "-dies":
    time.sleep(0.05)
    sys.exit(7)
linger()
"""


def main() -> int:
    folder, port, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    values = {"folder": str(folder), "port": port, "mode": mode, "worker": WORKER}

    def service(name: str, text: str, **options: object) -> ServiceCommand:
        return ServiceCommand(name, (sys.executable, "-c", text.format(name=name, **values)), **options)  # type: ignore[arg-type]

    sockets = folder / "sockets"
    sockets.mkdir()
    supervisor = Supervisor(
        [
            service("writer", PLAIN, ready_line="writer ready"),
            service("engine", ENGINE, ready_url=f"http://127.0.0.1:{port}/", restart=False),
            service("api", PLAIN, ready_line="api ready"),
            *([service("push", PLAIN, ready_line="push ready", vital=False)] if "push" in mode else []),
        ],
        sockets, lambda name, line: print(f"{name} | {line}", flush=True),
        running=lambda: 0, ready=lambda: print("ALL READY", flush=True),
        pace=PACE if mode in ("stubborn", "writer-dies", "push-dies") else 1.0,
    )
    return asyncio.run(supervisor.run())


if __name__ == "__main__":
    raise SystemExit(main())
