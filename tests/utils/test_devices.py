"""Where to compute."""

import pytest
import torch

from canter.utils.devices import resolve_device


def test_a_device_may_be_a_name_or_itself():
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("has_gpu", [True, False])
def test_none_takes_a_gpu_if_there_is_one(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device().type == ("cuda" if has_gpu else "cpu")


def test_a_device_that_is_not_there_is_an_error_that_says_what_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' is not available; there are: cpu$"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1").index == 1
    with pytest.raises(ValueError, match="'cuda:2' is not available; there are: cpu, cuda:0, cuda:1"):
        resolve_device("cuda:2")


def test_a_word_that_is_no_device_is_an_error():
    with pytest.raises(ValueError, match="unknown device 'gpu'; use 'cpu', 'cuda' or 'cuda:<index>'"):
        resolve_device("gpu")
