import os
import signal
import threading

import pytest

from sm120.matrix.signals import one_interrupt


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_interrupts_and_the_second_does_nothing(first: signal.Signals, second: signal.Signals) -> None:
    before = [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    cleaned = False
    with one_interrupt():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
        cleaned = True
    assert cleaned
    assert [signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_it_does_nothing_outside_the_main_thread() -> None:
    done = []

    def body() -> None:
        with one_interrupt():
            done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGTERM)]
