"""What goes wrong between ranks, as exceptions that a program can tell apart."""

__all__ = ["CommError", "CommTimeout", "Interrupted", "MismatchError", "PeerDied", "PeerLeft"]


class CommError(RuntimeError):
    """Ranks of a group could not finish a collective. The message names rank, operation and remedy."""


class MismatchError(CommError):
    """Ranks called different collectives, or one with different arguments. No data was touched; the group can go on."""


class PeerDied(CommError):
    """A rank's process has ended. The group cannot go on."""


class PeerLeft(CommError):
    """A rank has destroyed the group. The group cannot go on."""


class CommTimeout(CommError, TimeoutError):
    """A rank did not come in time. The group cannot go on."""


class Interrupted(CommError):
    """A rank was interrupted within a collective. The group cannot go on."""
