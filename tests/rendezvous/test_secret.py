"""The secret of a job: where it is found, which files are refused, and that no text shows it."""

from __future__ import annotations

import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dist_prims.rendezvous import secret as module
from dist_prims.rendezvous.secret import Secret, choose, is_one_host, of_this_host, provided_by_user

TEXT = "0123456789abcdef0123456789abcdef"


def write(path: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_variable_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / ".config/dist_prims/secret", "of the home folder")
    file = write(tmp_path / "other", "that the variable names")
    environ = {"DIST_PRIMS_SECRET": TEXT, "DIST_PRIMS_SECRET_FILE": str(file)}
    by_variable, by_file, by_home = (provided_by_user(each) for each in (environ, dict([environ.popitem()]), {}))
    assert by_variable
    assert by_file
    assert by_home
    assert by_variable.code("a") == Secret(TEXT.encode(), "").code("a")
    assert by_file.code("a") == Secret(b"that the variable names", "").code("a")
    assert by_home.code("a") == Secret(b"of the home folder", "").code("a")
    assert str(by_home) == f"Secret(of the file {tmp_path}/.config/dist_prims/secret)"


def test_without_a_variable_and_a_file_there_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert provided_by_user({}) is None
    assert choose("host0", {}) is None
    assert choose(None, {}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(mode: int, tmp_path: Path) -> None:
    file = write(tmp_path / "secret", mode=mode)
    with pytest.raises(ValueError, match=f"has mode {mode:o}: other users may have read .* chmod 600 {file}") as caught:
        provided_by_user({"DIST_PRIMS_SECRET_FILE": str(file)})
    assert TEXT not in str(caught.value)


def test_a_secret_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/file"):
        provided_by_user({"DIST_PRIMS_SECRET_FILE": "/no/such/file"})
    with pytest.raises(ValueError, match="has 5 characters, and a secret must have at least 16") as caught:
        provided_by_user({"DIST_PRIMS_SECRET": "s3cr3"})
    assert "s3cr3" not in str(caught.value)
    if os.geteuid() == 0:  # only root can give a file to another user
        file = write(tmp_path / "secret")
        os.chown(file, 65534, 65534)
        with pytest.raises(ValueError, match="belongs to user 65534"):
            provided_by_user({"DIST_PRIMS_SECRET_FILE": str(file)})


def test_the_file_of_this_host_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(lambda _: of_this_host(), range(32))]
    assert len({each.code("a") for each in found if each}) == 1
    assert None not in found
    (file,) = (tmp_path / "dist_prims").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    other = of_this_host()
    assert other
    assert found[0]
    assert other.code("a") != found[0].code("a")


def test_two_users_of_one_home_have_a_secret_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root with the home of another user, as under sudo -E, could not start a job: "belongs to user 65534"."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with TemporaryDirectory() as home:  # other users may not enter the folders of pytest
        os.chmod(home, 0o711)
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        root = of_this_host()
        os.chown(f"{home}/dist_prims", 65534, 65534)
        os.seteuid(65534)
        try:
            other = of_this_host()
        finally:
            os.seteuid(0)
    assert root
    assert other
    assert root.code("a") != other.code("a")


def test_a_home_in_which_no_file_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no")
    assert of_this_host() is None


def test_loopback_and_local_world_size_show_one_host() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    assert is_one_host("127.0.0.1", {})
    assert is_one_host("::1", {})
    assert not is_one_host("10.0.0.1", torchrun)
    assert is_one_host("10.0.0.1", {**torchrun, "WORLD_SIZE": "2"})
    assert not is_one_host("10.0.0.1", {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"})


def test_a_code_fits_one_message_and_one_secret() -> None:
    secret, other = Secret(b"a" * 32, "x"), Secret(b"b" * 32, "x")
    code = secret.code("hello", 1)
    assert secret.is_code(code, "hello", 1)
    assert not secret.is_code(code, "hello", 2)
    assert not secret.is_code(code, "hello", "1")
    assert not other.is_code(code, "hello", 1)
    for wrong in (None, 3, "", "\ud800", "ä", code[:-1], code + "0", ["x"]):
        assert not secret.is_code(wrong, "hello", 1)
    assert secret.key("hello", 1).hex() != code


def test_no_text_shows_the_secret() -> None:
    secret = Secret(TEXT.encode(), "DIST_PRIMS_SECRET")
    for text in (str(secret), repr(secret), f"{secret}", repr([secret]), str(vars(module))):
        assert TEXT not in text
    received: Secret = pickle.loads(pickle.dumps(secret))  # by spawn's pipe to a fresh interpreter
    assert received.code("a") == secret.code("a")
