"""What makes the many processes that tests start cheaper, and changes nothing of what they do.

Python reads it at its start where this folder is on PYTHONPATH (tests/conftest.py puts it there).
"""

import gc
import os
import time

gc.set_threshold(50_000, 10, 10)  # a quarter of what an import of vLLM costs are collections of garbage
# vLLM's workers look for their next step again and again, for a second after each; here others wait for the core.
os.sched_yield = lambda: time.sleep(0.0005)
