"""The fingerprint's sum for hosts, as machine code: one pass at memory speed, in one thread.

Import it at the first use, which comes after the engine is built: vLLM's engine looks into every object of every loaded
module for kernels to replace, and llvmlite has one that does not bear it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numba import njit

from titan_rl.weights.fingerprint_keys import BLOCK, odd_key

# Machine code is kept beside this file, which spares every process 0.3 s; in a read-only place each compiles anew.
_CACHE = os.access(Path(__file__).parent, os.W_OK)
_odd_key = njit(nogil=True, cache=_CACHE)(odd_key)


@njit(nogil=True, cache=_CACHE)
def sum_rows(bits, rows, columns, stride, first, pitch, keys):  # type: ignore[no-untyped-def]
    """`bits` is signed, one-dimensional and contiguous; all other integers are int64 and wrap."""
    total = np.int64(0)
    for row in range(rows):
        done = 0
        while done < columns:
            position = first + row * pitch + done
            place = position % BLOCK
            size = min(BLOCK - place, columns - done)
            # Unsigned, because indices that might be negative keep the compiler from using vector instructions.
            start, start_key = np.uint64(row * stride + done), np.uint64(place)
            block_sum = np.int64(0)
            for index in range(np.uint64(size)):
                element = np.int64(bits[start + index])
                block_sum += (element + (element >> 16)) * keys[start_key + index]
            total += block_sum * _odd_key(BLOCK + position // BLOCK)
            done += size
    return total
