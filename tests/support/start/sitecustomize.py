"""Rarer collections of garbage in every process that tests start: a quarter of what an import of vLLM costs is theirs.

Python reads it at its start where this folder is on PYTHONPATH (tests/conftest.py puts it there).
"""

import gc

gc.set_threshold(50_000, 10, 10)
