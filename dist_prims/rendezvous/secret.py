"""The secret of a job: its ranks know it, and no process of another user does.

A store at a TCP port, and every port at which a rank listens, accepts connections from every process that can reach it.
The ranks of a job therefore authenticate what they write there with codes (HMAC with SHA-256) that only this secret can
make. It is the first of these:

1. the secret that the launcher has distributed, over a channel that other users cannot read: spawn's pipe, MPI's
   broadcast, PMI;
2. the secret of the user, which is the first of: ``DIST_PRIMS_SECRET``; the file ``DIST_PRIMS_SECRET_FILE``; the file
   ``~/.config/dist_prims/secret``;
3. for ranks that meet at the loopback interface, a file of this user, which the first rank makes:
   ``dist_prims/secret-UID`` under ``XDG_CACHE_HOME`` (``~/.cache``). The name has the id of the user, because two users
   may have one home: root has the home of another user under ``sudo -E`` and in containers.

Over MPI and PMI rank 0 decides: if it has a secret of the user, all ranks need the same. A group that is merged from
groups of several jobs has no launcher in common, so the first does not apply. Ranks without a secret are not
authenticated.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from .network import is_loopback

__all__: list[str] = []

VARIABLE, FILE_VARIABLE = "DIST_PRIMS_SECRET", "DIST_PRIMS_SECRET_FILE"
REMEDY = f"give all ranks the same {VARIABLE}, such as the output of: openssl rand -hex 32"
_SHORTEST = 16  # characters: the codes can be read, and a shorter secret could be found by trying
_MODE = 0o600


class Secret:
    """A secret, and its ``source`` for messages. ``repr`` does not show the secret.

    >>> Secret(b"not for logs", "an example")
    Secret(of an example)

    ``is_of_launcher``: the ranks got it over the channel of their launcher, and no other process can find it.
    """

    __slots__ = ("_key", "is_of_launcher", "source")

    def __init__(self, key: bytes, source: str, is_of_launcher: bool = False) -> None:
        self._key, self.source, self.is_of_launcher = key, source, is_of_launcher

    @staticmethod
    def of_launcher(name: str) -> Secret:
        """A new random secret."""
        return Secret(secrets.token_bytes(32), name, is_of_launcher=True)

    def code(self, *parts: str | int) -> str:
        """The code that shows that the writer of these parts knows the secret.

        >>> Secret(b"1", "").code("a", "bc") == Secret(b"1", "").code("ab", "c")
        False
        """
        return self._digest("code", *parts).hex()

    def is_code(self, code: object, *parts: str | int) -> bool:
        """Whether ``code`` is the code of these parts. The time does not depend on where it differs."""
        received_code = code.encode(errors="replace") if isinstance(code, str) else b""
        return hmac.compare_digest(received_code, self.code(*parts).encode())

    def key(self, *purpose: str | int) -> bytes:
        """A key for one purpose, from which neither the secret nor the key for another purpose can be computed."""
        return self._digest("key", *purpose)

    def of_group(self, name: str) -> Secret:
        """The secret of the ranks of one group: a code that is made with it is invalid in another group.

        >>> Secret(b"1", "").of_group("a").code("b") == Secret(b"1", "").of_group("b").code("b")
        False
        """
        return Secret(self.key("group", name), self.source, self.is_of_launcher)

    def _digest(self, *parts: str | int) -> bytes:
        return hmac.digest(self._key, json.dumps(parts).encode(), "sha256")

    def __repr__(self) -> str:
        return f"Secret(of {self.source})"


def provided_by_user(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret that the user has provided, by a variable or a file; ValueError if it is short or not protected."""
    if VARIABLE in environ:
        return Secret(_checked(environ[VARIABLE].encode(), VARIABLE), VARIABLE)
    if path := environ.get(FILE_VARIABLE):
        return _read(Path(path), FILE_VARIABLE)
    with contextlib.suppress(RuntimeError):  # there is no home
        own = Path.home() / ".config" / "dist_prims" / "secret"
        if os.access(own, os.R_OK):
            return _read(own, "the file")
    return None


def of_this_host() -> Secret | None:
    """The secret of this user for ranks of one host, from a file that the first use makes; None if it cannot."""
    try:
        base = os.environ.get("XDG_CACHE_HOME", "")
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        path = cache / "dist_prims" / f"secret-{os.geteuid()}"
        if not os.path.exists(path):
            _make(path)
    except (OSError, RuntimeError):  # the latter: there is no home
        return None
    return _read(path, "the file")


def choose(address: str | None, environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret of ranks that meet at an address, without a channel of a launcher; None: they have none.

    ``address`` is None if the ranks meet at a file.
    """
    return provided_by_user(environ) or (of_this_host() if is_one_host(address, environ) else None)


def is_one_host(address: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks that meet at this address are on one host. torchrun provides the number of ranks on this host."""
    if address is None:
        return False
    sizes = [environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE")]
    return is_loopback(address) or ("TORCHELASTIC_RUN_ID" in environ and None not in sizes and sizes[0] == sizes[1])


def _make(path: Path) -> None:
    """Make the file with a random secret, unless another process has made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # appears with its content
    finally:
        temporary.unlink()


@functools.cache  # later groups are made without a descriptor: there may be none left
def _read(path: Path, what: str) -> Secret:
    """Read a file, once in a process; ValueError if other users may read or write it."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"{what} {path} belongs to user {status.st_uid}; the secret must be a file of this user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ValueError(
                f"{what} {path} has mode {stat.S_IMODE(status.st_mode):o}: other users may have read the secret; put a "
                f"new one into it and call: chmod 600 {path}"
            )
        return Secret(_checked(file.read().strip(), f"{what} {path}"), f"{what} {path}")


def _checked(key: bytes, what: str) -> bytes:
    if len(key) < _SHORTEST:
        raise ValueError(f"{what} has {len(key)} characters, and a secret must have at least {_SHORTEST}; {REMEDY}")
    return key


_of_spawn: Secret | None = None  # from the parent, in a spawned rank
_of_ranks: Secret | None = None  # of the ranks that a launcher has started, after their rendezvous
_has_rendezvous = False


def keep_secret_of_parent(secret: Secret) -> None:
    """Keep the secret that ``spawn`` in the parent process has made for its ranks."""
    global _of_spawn
    _of_spawn = secret


def secret_of_parent() -> Secret | None:
    return _of_spawn


def remember(secret: Secret | None) -> None:
    """Keep the secret of the ranks that this process has found by the rendezvous of a launcher."""
    global _of_ranks, _has_rendezvous
    _of_ranks, _has_rendezvous = secret, True


def remembered() -> Secret | None:
    return _of_ranks


def has_rendezvous() -> bool:
    """Whether this process has found ranks by the rendezvous of a launcher."""
    return _has_rendezvous
