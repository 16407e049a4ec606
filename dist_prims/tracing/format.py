"""Format of the file of a trace: a header, slots of 64 bytes for events of Python, and slots for events of C++.

``csrc/common/trace.h`` has the same layout. A slot holds an event (what a rank sends, waits for or computes, with its
times) or a piece of a text. The last byte of a slot is its kind, and is written last: a slot without a kind is
unfinished. ``recorder.py`` writes the file and ``reader.py`` reads it. The module imports neither torch nor NumPy.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__: list[str] = []

MAGIC = 0x3130454341525444  # "DTRACE01"
VERSION = 1
HEADER_BYTES = 4096
SLOT = 64  # bytes
HEADER = struct.Struct("<QQQQ32xQ56xQ56xQ56xQ")  # the fields of ``TraceHeader``; a counter has a cache line of its own
DROPPED_BY_PYTHON = 128  # where the field ``dropped`` is
COUNTER = struct.Struct("<Q")

# The fields of an event, and their types in the code that both ``struct`` and NumPy read. Times are nanoseconds of
# CLOCK_MONOTONIC; ``sequence`` is the number of the call; ``peer`` and ``step`` are -1 where there is none; ``group``
# and ``name`` are numbers of texts. Between ``failed`` and ``kind``, the last byte of the slot, 5 bytes are unused.
EVENT_FIELDS: tuple[str, ...] = ("begin", "end", "bytes", "sequence", "peer", "step", "thread", "group", "name")
EVENT_FIELDS += ("segment", "collective", "dtype", "op", "failed", "kind")
EVENT_TYPES = "qqQQiiIIIHBBBBB"
EVENT = struct.Struct(f"<{EVENT_TYPES[:-1]}5x{EVENT_TYPES[-1]}")
TEXT = struct.Struct("<IHB55sBB")  # number of the text, number of the piece, bytes, piece, kind of text, kind
TEXT_BYTES = 55

# The kinds of a slot. QUEUED: a call waits for its turn in the collective queue. STEP: a step of a schedule. AGREE: the
# comparison of a call with the calls of the other ranks. ACTION: of a pipeline. BUCKET: gradients sent together.
(TEXT_SLOT, COLLECTIVE, QUEUED, STEP, SEND, RECEIVE, WAIT, REDUCE, COPY, AGREE, ACTION, BUCKET) = range(1, 13)
_EVENT_NAMES = "collective queued step send receive wait reduce copy agree action bucket"
KINDS = dict(enumerate(_EVENT_NAMES.split(), start=COLLECTIVE))  # the kinds of events, with their names

(NAME, GROUP, PROCESS, CLOCK) = range(1, 5)  # kinds of text

# In the order of the enumerations of csrc/common/types.h; a test compares them.
COLLECTIVES: tuple[str, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather")
COLLECTIVES += ("scatter", "all_to_all", "barrier", "scan", "exclusive_scan")


class TraceHeader(NamedTuple):
    """The header of a file. Slots are counted, offsets are bytes from the beginning of the file."""

    magic: int
    version: int
    cpp_slots: int
    cpp_offset: int
    cpp_taken: int  # slots that C++ has asked for; those beyond ``cpp_slots`` were dropped
    dropped: int  # events of Python
    python_slots: int
    ended: int  # 1 if the trace has ended, else 0


def text_slots(kind: int, number: int, text: str) -> list[bytes]:
    """The slots of a text, in pieces of 55 bytes.

    >>> [TEXT.unpack(slot)[1:3] for slot in text_slots(NAME, 1, "x" * 56)]
    [(0, 55), (1, 1)]
    """
    data = text.encode()
    pieces = [data[at : at + TEXT_BYTES] for at in range(0, len(data), TEXT_BYTES)]
    return [TEXT.pack(number, part, len(piece), piece, kind, TEXT_SLOT) for part, piece in enumerate(pieces)]
