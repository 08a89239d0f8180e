"""User code gives with `execution="auto"` what it gives with "eager", as the verdicts of the table say."""

import itertools
import sys

import pytest
from function_idioms import MODES, TABLE, check_function
from idioms import IDIOMS, check_idiom
from torch.distributions import Distribution


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """torch.cond switches the checks of all distributions off; one idiom runs under a profiler."""
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)
    yield
    sys.setprofile(None)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_user_code_trains_as_it_does_eagerly(idiom):
    check_idiom(idiom, "auto", "cpu", {"act", "learn"})


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        pytest.param(function, mode, id=f"{function.name}-{mode}")
        for function, mode in zip(TABLE, itertools.cycle(MODES))
    ],
)
def test_functions_give_what_they_give_eagerly(function, mode):
    check_function(function, "auto", "cpu", function.expected, mode)


def test_the_table_of_idioms_is_broad():
    assert len(IDIOMS) >= 120
    assert sum(idiom.verdict == "limit" for idiom in IDIOMS) <= 6
