"""Words of the command line become values: whole numbers, lists, YAML."""

import pytest

from canter.cli.flags import given, parse_value
from canter.cli.options import parse_train


def test_whole_numbers_may_have_exponents_and_underscores_and_lists_commas():
    given = ["--total-timesteps", "2e5", "--num-envs", "1_6", "--max-iterations", "1.2e1"]
    options, config = parse_train(["CartPole-v1", *given, "--policy.actor-hidden-dims", "32", "1e2"])
    assert parse_train(["CartPole-v1", "--seeds", "1,2,3"])[0].seeds == (1, 2, 3)
    assert (options.total_timesteps, options.num_envs, options.settings.max_iterations) == (200_000, 16, 12)
    assert config["policy"]["actor_hidden_dims"] == [32, 100]


@pytest.mark.parametrize("text", ["1.5", "15e-1", "1e5x", "1e999", "many"])
def test_a_number_that_is_not_whole_is_refused_where_whole_ones_are_needed(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_train(["CartPole-v1", "--total-timesteps", text])
    assert f"'{text}' is no whole number" in capsys.readouterr().err


def test_numbers_with_an_exponent_are_numbers_in_yaml_flags():
    assert parse_value("{critic: {lr: 1e-3, name: 1e, n: [2E+4]}}") == {
        "critic": {"lr": 0.001, "name": "1e", "n": [20000.0]}
    }
    with pytest.raises(ValueError, match="is not YAML"):
        parse_value("{a: [}")


def test_a_flag_is_found_with_dashes_underscores_and_equals_signs():
    assert given(["--a-b", "1"], "--a-b") == "1"
    assert given(["--a_b=x_y"], "--a-b") == "x_y"
    assert given(["--a-b"], "--a-b") is None
    assert given([], "--a-b") is None
