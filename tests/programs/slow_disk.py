"""The command line, or a recording, whose writer is on a slow disk (tests/support/writers/slow_writer.py)."""

from __future__ import annotations

import sys

from vllm_tap.serve import writer_process


def slow_down() -> None:
    """Writers that this process starts from now on are slow."""
    real = writer_process.writer_command

    def slow(*args: object, **more: object) -> tuple[str, ...]:
        program = "tests.support.writers.slow_writer"
        return tuple(program if word == "writer_service" else word for word in real(*args, **more))  # type: ignore[arg-type]

    writer_process.writer_command = slow


if __name__ == "__main__":
    from vllm_tap.cli.main import main

    slow_down()
    sys.exit(main())
