"""User code gives with `execution="auto"` what it gives with "eager", or runs eagerly with a message."""

import pytest
from function_idioms import MODES, TABLE, check_function
from idioms import IDIOMS, Alg, Ext, Net, Walk, check_idiom
from torch.distributions import Distribution

from canter.runners import OnPolicyRunner


@pytest.fixture(autouse=True)
def checked_distributions(monkeypatch):
    """torch.cond switches the checks of all distributions off."""
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_user_code_trains_as_it_does_eagerly(idiom):
    check_idiom(idiom, "auto", "cpu", idiom.expected, {"act", "process", "learn"})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", TABLE, ids=lambda function: function.name)
def test_functions_give_what_they_give_eagerly(function, mode):
    check_function(function, "auto", "cpu", function.expected, mode)


def test_an_extension_of_a_users_algorithm_costs_no_look_in_every_iteration():
    env = Walk(2, "cpu", seed=1)
    alg = Alg(Net(), extensions=[Ext()])
    runner = OnPolicyRunner(env, alg, show_progress=False)
    runner.learn(2)
    before = alg.executor.state_number  # the first update makes the moments of the optimizer
    runner.learn(5)
    assert alg.executor.state_number == before
