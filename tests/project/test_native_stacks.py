"""What a test shows of a rank that dies by a signal."""

import ctypes
import signal

import pytest

import dist_prims


@pytest.mark.parametrize(("function", "number"), [("abort", signal.SIGABRT), ("puts", signal.SIGSEGV)])
def test_a_rank_that_dies_by_a_signal_shows_its_stacks(
    function: str, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def die_in_c() -> None:
        getattr(ctypes.CDLL(None), function)(None)

    with pytest.raises(dist_prims.RankFailedError, match=number.name):
        dist_prims.spawn(die_in_c, 1, init=False)
    shown = capsys.readouterr().err
    assert " in die_in_c" in shown
    assert f": {function} + 0x" in shown
