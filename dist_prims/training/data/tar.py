"""Sequential reader of samples in a tar archive.

A million small files are slow to open; an archive of them can be read at the speed of the disk. ``tarfile`` is slower:
it takes longer to read a member's header than to read the member. This reader supports what archives of samples need:
plain files and directories, with the long names of GNU and of POSIX (pax). For everything else (links, devices, sparse
files, names that lead out of the archive) it raises an error that names the member. It also raises if an archive is
damaged, ends early or exceeds a limit: a run that stops is better than a sample that is missing without an error.
"""

from __future__ import annotations

import functools
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__: list[str] = []

_BLOCK = 512
_ZEROS = bytes(_BLOCK)
_FILES, _DIRECTORY, _LONG_NAME, _LONG_LINK, _PAX, _PAX_FOR_ALL = (b"0", b"\0", b"7"), b"5", b"L", b"K", b"x", b"g"
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
_NOTES = 1 << 20  # bytes of a long name or of pax records
_HARMLESS = {"mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "charset", "hdrcharset"}
_OUR_OWN = "__key__"


class TarError(ValueError):
    """An archive cannot be read as samples. The message names the archive and the member.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".tar") as file:
    ...     _ = file.write(b"no archive"), file.flush()
    ...     try:
    ...         list(tar_samples(file.name))
    ...     except TarError as error:
    ...         print(str(error).replace(file.name, "data.tar"))
    data.tar ends early, after 0 members; fetch it again
    """


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


@dataclass
class _Limits:
    member_bytes: int
    total_bytes: int | None
    members: int | None


def tar_samples(
    path: str | os.PathLike[str],
    decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
    *,
    max_member_bytes: int = 1 << 30,
    max_total_bytes: int | None = None,
    max_members: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The samples of a .tar or .tar.gz: consecutive files with the same name up to the first dot.

    >>> import io, tarfile, tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".tar") as file:
    ...     with tarfile.open(file.name, "w") as archive:
    ...         for name, data in {"a/1.txt": b"one", "a/1.cls": b"7", "a/2.txt": b"two"}.items():
    ...             member = tarfile.TarInfo(name)
    ...             member.size = len(data)
    ...             archive.addfile(member, io.BytesIO(data))
    ...     for sample in tar_samples(file.name, {"txt": bytes.decode, "cls": int}):
    ...         print(sample)
    {'__key__': 'a/1', 'txt': 'one', 'cls': 7}
    {'__key__': 'a/2', 'txt': 'two'}

    A field is decoded by the decoder for its extension after the first dot, or else after the last dot. Without a
    decoder it is bytes. The limits apply to the unpacked contents.
    """
    limits = {"max_member_bytes": max_member_bytes, "max_total_bytes": max_total_bytes, "max_members": max_members}
    sample: dict[str, Any] = {}
    for name, data in tar_members(path, **limits):  # type: ignore[arg-type]
        folder, slash, file = name.rpartition("/")
        stem, _, field = file.partition(".")
        key = folder + slash + stem
        if sample and sample[_OUR_OWN] != key:
            yield sample
            sample = {}
        if field in sample or field == _OUR_OWN:
            raise TarError(f"{os.fspath(path)}: member {name!r}: sample {key!r} already has a field {field!r}")
        sample[_OUR_OWN] = key
        sample[field] = _decoded(path, name, field, data, decoders or {})
    if sample:
        yield sample


def _decoded(
    path: str | os.PathLike[str], name: str, field: str, data: bytes, decoders: Mapping[str, Callable[[bytes], Any]]
) -> Any:
    decode = decoders.get(field) or decoders.get(field.rpartition(".")[2])
    if decode is None:
        return data
    try:
        return decode(data)
    except Exception as error:
        raise TarError(f"{os.fspath(path)}: member {name!r} cannot be decoded: {error!r}") from error


def tar_members(
    path: str | os.PathLike[str],
    *,
    max_member_bytes: int = 1 << 30,
    max_total_bytes: int | None = None,
    max_members: int | None = None,
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file in a .tar or .tar.gz, in their order; see :func:`tar_samples`.

    >>> list(tar_members("/dev/null"))
    Traceback (most recent call last):
    ...
    dist_prims.training.data.tar.TarError: /dev/null ends early, after 0 members; fetch it again
    """
    limits = _Limits(max_member_bytes, max_total_bytes, max_members)
    with open(path, "rb") as buffered:
        file: _Readable = buffered
        if buffered.peek(2)[:2] == b"\x1f\x8b":
            file = gzip.GzipFile(fileobj=buffered)
        elif buffered.seekable():  # members are read straight into their own memory
            os.lseek(buffered.fileno(), 0, os.SEEK_SET)
            file = buffered.raw
        reader = _Reader(os.fspath(path), file, limits)
        try:
            yield from reader.members()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TarError(f"{reader.place()}: the compressed data is damaged or ends early: {error}") from error


class _Reader:
    """One pass through an archive."""

    def __init__(self, path: str, file: _Readable, limits: _Limits) -> None:
        self.path, self.file, self.limits = path, file, limits
        self.count = self.total = self.padding = 0
        self.name = ""

    def place(self) -> str:
        return f"{self.path}: after {self.count} members (the last: {self.name!r})" if self.count else self.path

    def members(self) -> Iterator[tuple[str, bytes]]:
        notes: dict[str, str] = {}  # values of special members for the next member
        while (header := self._header()) != _ZEROS:
            self._verify(header)
            kind, size = header[156:157], self._number(header[124:136])
            if kind in (_LONG_NAME, _LONG_LINK):
                text = self._text(self._note(size).rstrip(b"\0"))
                notes.update({"path": text} if kind == _LONG_NAME else {})  # the link is refused when it comes
            elif kind in (_PAX, _PAX_FOR_ALL):
                self._take(self._records(self._note(size)), kind, notes)
            else:
                name = self._checked(notes.get("path") or self._own_name(header), kind)
                size = self._size(notes["size"]) if "size" in notes else size
                notes.clear()
                if kind == _DIRECTORY or name.endswith("/"):
                    self._note(size)
                else:
                    self._admit(name, size)
                    yield name, self._content(size)
        self._end()

    def _read(self, size: int) -> bytes:
        found = self.file.read(size) or b""
        while len(found) < size:
            more = self.file.read(size - len(found))
            if not more:
                raise TarError(f"{self.path} ends early, after {self.count} members; fetch it again")
            found += more
        return found

    def _header(self) -> bytes:
        return self._read(self.padding + _BLOCK)[self.padding :]

    def _content(self, size: int) -> bytes:
        self.padding = -size % _BLOCK  # read with the next header
        return self._read(size)

    def _note(self, size: int) -> bytes:
        if size > _NOTES:
            raise TarError(f"{self.place()}: the next member's name or records take {size} bytes; at most {_NOTES}")
        return self._content(size)

    def _verify(self, header: bytes) -> None:
        # The checksum counts as blanks; the lower half of Adler-32 is 1 + the sum, mod 65521.
        if zlib.adler32(header) & 0xFFFF != _lower_half(header[148:156]):
            given = self._number(header[148:156])
            raise TarError(
                f"{self.place()}: the next header's checksum is wrong ({given}): not a tar archive, or a damaged one"
            )

    def _number(self, field: bytes) -> int:
        try:
            return _number(field)
        except ValueError:
            raise TarError(f"{self.place()}: the next header holds {field!r} for a number: a damaged archive") from None

    def _size(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise TarError(f"{self.place()}: the next member's size is given as {text!r}: a damaged archive")
        return int(text)

    def _text(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise TarError(f"{self.place()}: the name {name!r} is not UTF-8; write the archive with UTF-8") from None

    def _own_name(self, header: bytes) -> str:
        name = header[:100].partition(b"\0")[0]
        if header[345] and header[257:263] == b"ustar\0":
            name = header[345:500].partition(b"\0")[0] + b"/" + name
        return self._text(name)

    def _records(self, text: bytes) -> dict[str, str]:
        """The pax records, each "length key=value" and a line's end."""
        found = {}
        while text:
            digits, _, rest = text.partition(b" ")
            length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
            key, equals, value = text[len(digits) + 1 : length - 1].partition(b"=")
            if not rest or not equals or text[length - 1 : length] != b"\n":
                raise TarError(f"{self.place()}: the next member's pax records are damaged")
            found[self._text(key)] = self._text(value) if key in (b"path", b"size") else ""
            text = text[length:]
        return found

    def _take(self, records: dict[str, str], kind: bytes, notes: dict[str, str]) -> None:
        for key, value in records.items():
            if key in ("path", "size") and kind == _PAX:
                notes[key] = value
            elif key not in _HARMLESS and not key.startswith(("SCHILY.", "LIBARCHIVE.")) and key != "linkpath":
                raise TarError(
                    f"{self.place()}: the next member has pax record {key!r}, which this reader does not support"
                )

    def _checked(self, name: str, kind: bytes) -> str:
        if kind not in _FILES and kind != _DIRECTORY:
            what = _KINDS.get(kind, f"of kind {kind!r}")
            raise TarError(f"{self.path}: member {name!r} is {what}; only files and directories are read")
        inner = name
        while inner.startswith("./"):
            inner = inner[2:].lstrip("/")
        inner = inner or name[:2]  # "./", the archive's own directory
        if not inner or inner[0] == "/" or "\0" in inner or (".." in inner and ".." in inner.split("/")):
            raise TarError(f"{self.path}: member {name!r} leads out of the archive, or has no name; use relative names")
        return inner

    def _admit(self, name: str, size: int) -> None:
        limits = self.limits
        self.name, self.count, self.total = name, self.count + 1, self.total + size
        if size > limits.member_bytes:
            self._refuse("max_member_bytes", size, limits.member_bytes)
        if limits.total_bytes is not None and self.total > limits.total_bytes:
            self._refuse("max_total_bytes", self.total, limits.total_bytes)
        if limits.members is not None and self.count > limits.members:
            self._refuse("max_members", self.count, limits.members)

    def _refuse(self, what: str, value: int, limit: int) -> None:
        raise TarError(
            f"{self.path}: member {self.name!r} makes {value}, over {what}={limit}; raise the limit if you trust it"
        )

    def _end(self) -> None:
        """Check that only zeros follow the end mark; gzip compares its checksum when they are read."""
        while rest := self.file.read(1 << 16):
            if rest.count(0) != len(rest):
                raise TarError(f"{self.place()}: data after the end mark; separate concatenated archives")


def _number(field: bytes) -> int:
    """
    >>> _number(b"00000303240\\0"), _number(b"  17 \\0"), _number(b"\\0" * 8), _number(b"\\x80" + bytes(9) + b"\\1\\0")
    (100000, 15, 0, 256)
    """
    digits = field[:-1]
    if not digits.isdigit():  # all current programs write digits only; older ones add blanks
        if field[0] == 0x80:  # GNU: too large for octal digits
            return int.from_bytes(field[1:], "big")
        digits = field.strip(b" \0") or b"0"
        if not digits.isdigit():  # int() would take signs, underscores and prefixes
            raise ValueError(field)
    return int(digits, 8)


@functools.lru_cache(1 << 12)
def _lower_half(given: bytes) -> int:
    """The lower half of the Adler-32 of a header with this checksum; -1 if the checksum is not a number.

    The headers of an archive have few different checksums.
    """
    try:
        return (_number(given) + sum(given) - 8 * 32 + 1) % 65521
    except ValueError:
        return -1
