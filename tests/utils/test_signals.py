import os
import signal
import threading

import pytest

from canter.utils.signals import StopSignal

BOTH = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture(autouse=True)
def handlers():
    """Whatever a test does, the handlers are as before."""
    before = {number: signal.getsignal(number) for number in BOTH}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_only_sets_the_flag(number):  # F23, F24
    with StopSignal() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number
        assert not stop.is_urgent


@pytest.mark.parametrize("ends_in_error", [True, False])
def test_handlers_are_restored_however_it_ends(handlers, ends_in_error):  # F25
    try:
        with StopSignal():
            assert all(signal.getsignal(number) != handlers[number] for number in BOTH)
            if ends_in_error:
                raise LookupError
    except LookupError:
        pass
    assert all(signal.getsignal(number) == handlers[number] for number in BOTH)


def test_a_second_interrupt_is_what_it_was_before():  # F23
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.requested == signal.SIGINT
    assert stop.is_urgent


@pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1]])
def test_any_second_signal_is_urgent(first, second):
    seen = []
    signal.signal(second, lambda number, frame: seen.append(number))
    with StopSignal() as stop:
        signal.raise_signal(first)
        signal.raise_signal(second)
        assert (stop.requested, stop.is_urgent) == (first, True)
    assert seen == [second]


def test_the_users_own_handler_is_called_once_per_signal():  # F25
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append((number, frame is not None)))
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == signal.SIGTERM
    assert seen == [(signal.SIGTERM, True)]


def test_an_ignored_signal_does_not_break_the_handler():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_two_may_be_entered_one_inside_the_other():
    with StopSignal() as outer, StopSignal() as inner:
        signal.raise_signal(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (signal.SIGTERM, signal.SIGTERM)


def test_another_thread_has_no_handlers_and_no_errors(handlers):  # F25
    seen = []

    def work():
        with StopSignal() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, handlers[signal.SIGTERM])]
