import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch

from canter.utils import runtime
from canter.utils.checkpoint import load_checkpoint, save_checkpoint
from canter.utils.runtime import (
    StopSignal,
    resolve_device,
    rng_state,
    seed_everything,
    set_rng_state,
)

# Devices


def test_device_is_resolved_from_a_name_or_a_device():
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("has_gpu", [True, False])
def test_none_selects_a_gpu_if_there_is_one(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device().type == ("cuda" if has_gpu else "cpu")


def test_unavailable_device_is_an_error_that_lists_the_available_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' is not available; there are: cpu$"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1").index == 1
    with pytest.raises(ValueError, match="'cuda:2' is not available; there are: cpu, cuda:0, cuda:1"):
        resolve_device("cuda:2")


def test_unknown_device_name_is_an_error():
    with pytest.raises(ValueError, match="unknown device 'gpu'; use 'cpu', 'cuda' or 'cuda:<index>'"):
        resolve_device("gpu")


# Random number generators


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_seed_repeats_every_generator_and_other_seeds_differ():
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=str(seed)):
        seed_everything(seed)


def test_generators_continue_exactly_from_a_checkpoint(tmp_path):
    seed_everything(5)
    draw()  # leaves a cached second gaussian in python's and numpy's generator
    save_checkpoint(tmp_path / "model_1.pt", {"rng": rng_state()})
    want = [draw() for _ in range(3)]
    seed_everything(6)
    set_rng_state(load_checkpoint(tmp_path / "model_1.pt")["rng"])
    assert [draw() for _ in range(3)] == want


@pytest.mark.gpu
def test_cuda_generators_continue_exactly(tmp_path):
    seed_everything(5)
    torch.rand(3, device="cuda")
    save_checkpoint(tmp_path / "model_1.pt", {"rng": rng_state()})
    want = torch.rand(5, device="cuda")
    seed_everything(6)
    # Loading onto the GPU moves the states too, which generators take on the CPU only.
    set_rng_state(load_checkpoint(tmp_path / "model_1.pt", map_location="cuda")["rng"])
    assert torch.equal(torch.rand(5, device="cuda"), want)


# Signals

BOTH = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of a program in a terminal; programs in the background ignore some signals."""
    before = {number: signal.getsignal(number) for number in BOTH}
    usual = {number: signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL for number in BOTH}
    for number, handler in usual.items():
        signal.signal(number, handler)
    yield usual
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_only_sets_the_flag(number):
    with StopSignal() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number
        assert not stop.is_urgent


@pytest.mark.parametrize("ends_in_error", [True, False])
def test_handlers_are_restored_on_exit_and_on_error(handlers, ends_in_error):
    try:
        with StopSignal():
            assert all(signal.getsignal(number) != handlers[number] for number in BOTH)
            if ends_in_error:
                raise LookupError
    except LookupError:
        pass
    assert all(signal.getsignal(number) == handlers[number] for number in BOTH)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_second_interrupt_after_a_second_raises_keyboard_interrupt(monkeypatch, depth):
    monkeypatch.setattr(runtime, "URGENT_SECONDS", 0.05)
    with contextlib.ExitStack() as stack:
        stops = [stack.enter_context(StopSignal()) for _ in range(depth)]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.06)
        assert not any(stop.is_urgent for stop in stops)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert all(stop.requested == signal.SIGINT and stop.is_urgent for stop in stops)


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_second_signal_of_another_kind_changes_nothing(monkeypatch, first):
    monkeypatch.setattr(runtime, "URGENT_SECONDS", 0.0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    first = getattr(signal, first)
    with StopSignal() as stop:
        for number in (first, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert (stop.requested, stop.is_urgent) == (first, False)


def test_the_users_own_handler_is_called_once_per_signal():
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


def test_a_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested is None


def test_stop_signals_can_be_nested():
    with StopSignal() as outer, StopSignal() as inner:
        signal.raise_signal(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (signal.SIGTERM, signal.SIGTERM)


def test_another_thread_installs_no_handlers_and_raises_no_error(handlers):
    seen = []

    def work():
        with StopSignal() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, handlers[signal.SIGTERM])]
