"""The file of a trace: a header, slots of 64 bytes for events of Python, and slots for events of C++.

``csrc/common/trace.h`` has the same layout. A slot is an event or a piece of a text; its last byte is the kind, which
is written last. Slots without a kind are unfinished. The module imports neither torch nor NumPy.
"""

from __future__ import annotations

import struct

__all__: list[str] = []

MAGIC = 0x3130454341525444  # "DTRACE01"
VERSION = 1
HEADER_BYTES = 4096
SLOT = 64
# magic, version, slots of C++ and where they begin; then, each in a cache line of its own: the slots that C++ has
# taken, events that Python has dropped, slots of Python, whether the trace has ended (1) or not (0)
HEADER = struct.Struct("<QQQQ32xQ56xQ56xQ56xQ")
DROPPED_BY_PYTHON = 128
COUNTER = struct.Struct("<Q")

# begin, end, bytes, sequence, peer, step, thread, group, name, segment, collective, dtype, op, failed, kind
EVENT = struct.Struct("<qqQQiiIIIHBBBB5xB")
# number, part, bytes, text, kind of text, kind
TEXT = struct.Struct("<IHB55sBB")
TEXT_BYTES = 55

(TEXT_SLOT, COLLECTIVE, QUEUED, STEP, SEND, RECEIVE, WAIT, REDUCE, COPY, AGREE, ACTION, BUCKET) = range(1, 13)
KINDS = {
    COLLECTIVE: "collective",
    QUEUED: "queued",
    STEP: "step",
    SEND: "send",
    RECEIVE: "receive",
    WAIT: "wait",
    REDUCE: "reduce",
    COPY: "copy",
    AGREE: "agree",
    ACTION: "action",
    BUCKET: "bucket",
}

(NAME, GROUP, PROCESS, CLOCK) = range(1, 5)  # kinds of text

# In the order of the enumerations of csrc/common/types.h; a test compares them.
COLLECTIVES: tuple[str, ...] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)
COLLECTIVES += ("barrier", "scan", "exclusive_scan")


def text_slots(kind: int, number: int, text: str) -> list[bytes]:
    """The slots of a text.

    >>> [TEXT.unpack(slot)[1:3] for slot in text_slots(NAME, 1, "x" * 56)]
    [(0, 55), (1, 1)]
    """
    data = text.encode()
    pieces = [data[at : at + TEXT_BYTES] for at in range(0, len(data), TEXT_BYTES)]
    return [TEXT.pack(number, part, len(piece), piece, kind, TEXT_SLOT) for part, piece in enumerate(pieces)]
