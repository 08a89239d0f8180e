"""User code captured as CUDA graphs gives what it gives eagerly, or runs eagerly with a message."""

import pytest
import torch
from function_idioms import MODES, TABLE, check_function
from idioms import IDIOMS, check_idiom

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_captured_user_code_trains_as_it_does_eagerly(idiom):
    check_idiom(idiom, "auto", "cuda", {"rollout", "learn"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", [f for f in TABLE if f.is_for_gpus], ids=lambda function: function.name)
def test_captured_functions_give_what_they_give_eagerly(function, mode):
    check_function(function, "auto", "cuda", function.expected, mode)
