"""The writer where few files may be open: FEW_DESCRIPTORS of them."""

from __future__ import annotations

import os
import resource
import sys

from writer_service.__main__ import main

if __name__ == "__main__":
    few = int(os.environ["FEW_DESCRIPTORS"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    sys.exit(main())
