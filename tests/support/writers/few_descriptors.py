"""The writer where few files may be open, FEW_DESCRIPTORS of them, and a porter may stand still for PORTER_SILENT_S."""

from __future__ import annotations

import os
import resource
import sys

from writer_service.__main__ import main
from writer_service.receive.porter_process import PorterProcess

if __name__ == "__main__":
    few = int(os.environ["FEW_DESCRIPTORS"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    PorterProcess.silent_s_max = float(os.environ.get("PORTER_SILENT_S", PorterProcess.silent_s_max))
    sys.exit(main())
