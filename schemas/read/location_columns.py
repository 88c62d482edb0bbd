"""The table that says where rows lie: a column of int64 each, ``[columns, n]``.

A row's piece of a layer in stream s is the bytes from ``PARTS + s`` on, ``(FIRST + column of the layer × STEP) ×
piece bytes`` further. In a cold block (schemas.store.cold_block) it follows from ROW alone; the others are 0 there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

SEGMENT: Final = 0  # which of those that the rows are in
OFFSET: Final = 1  # of the frame in it
ROW: Final = 2  # of the block, for its checksum; -1 where it has none
KIND: Final = 3  # which layers the frame has
FIRST: Final = 4  # number of the first layer's piece in each of the frame's streams
STEP: Final = 5  # pieces from a layer to the next
TOKEN: Final = 6
FLAGS: Final = 7
PARTS: Final = 8  # byte offset of each of the frame's streams, from here on

I64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
