"""What another thread asks for is run in the thread that waits for it, which can be interrupted."""

from __future__ import annotations

import threading

import pytest

from memwal_ops.formats.lance.commit.rebased_commit import OwnThread


def test_functions_run_in_the_thread_that_waits() -> None:
    own, here = OwnThread(), threading.get_ident()

    def call() -> list[int]:
        return [threading.get_ident(), own.run(threading.get_ident), own.run(threading.get_ident)]

    other, *asked = own.wait_for(call)
    assert other != here
    assert asked == [here, here]


def test_errors_are_raised_where_they_belong() -> None:
    own = OwnThread()

    def refuses() -> None:
        raise ValueError("refused")

    def call() -> str:
        with pytest.raises(ValueError, match="refused"):
            own.run(refuses)
        raise KeyError("of the call")

    with pytest.raises(KeyError, match="of the call"):
        own.wait_for(call)


def test_an_interrupt_ends_the_call_first() -> None:
    """Ctrl-C in the middle of what is asked for: nothing is run after it, and it is raised once the call has ended."""
    own, ended = OwnThread(), []

    def interrupted() -> None:
        raise KeyboardInterrupt

    def call() -> None:
        for _ in range(2):
            with pytest.raises(InterruptedError):
                own.run(interrupted)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        own.wait_for(call)
    assert ended == [True]
