"""Probabilities that fall with the iteration."""

import math

import pytest

from canter.algorithms.schedules import GET_PROB_FUNC


def test_linear_falls_to_zero_at_the_scale():
    f = GET_PROB_FUNC("linear", 10)
    assert [f(x) for x in (0, 5, 10, 20)] == [1.0, 0.5, 0.0, 0.0]


def test_exp_decays_by_one_over_the_scale():
    f = GET_PROB_FUNC("exp", 4)
    assert [f(x) for x in (0, 1, 2)] == pytest.approx([1.0, 0.75, 0.75**2])
    assert [GET_PROB_FUNC("exp", 1)(x) for x in (0, 1, 5)] == [1.0, 0.0, 0.0]


def test_tanh_is_a_half_at_the_scale_and_takes_whole_numbers():
    f = GET_PROB_FUNC("tanh", 100)
    assert f(0) == pytest.approx(0.5 * (1 + math.tanh(1)))
    assert f(0) == pytest.approx(0.8808, abs=1e-4)
    assert f(100) == 0.5
    values = [f(x) for x in range(0, 500, 20)]
    assert values == sorted(values, reverse=True)
    assert all(isinstance(value, float) and 0 <= value <= 1 for value in values)


def test_numbers_are_constant_and_callables_are_used():
    f = GET_PROB_FUNC(0.3, 10)
    assert f(0) == f(1000) == 0.3
    assert GET_PROB_FUNC(lambda x: x + 7, 10)(1) == 8


def test_an_unknown_schedule_or_scale_is_an_error():
    with pytest.raises(ValueError, match="unknown schedule 'cosine'; known are linear, exp, tanh"):
        GET_PROB_FUNC("cosine", 10)
    for scale in (0, -1):
        with pytest.raises(ValueError, match=f"iteration_scale must be positive, got {scale}"):
            GET_PROB_FUNC("linear", scale)
