"""Mirrors by hand, their checks, and that a mirrored distribution is the distribution of the mirrored action."""

import numpy as np
import pytest
import torch

from canter.algorithms.mirrors import ActionMirror, Mirror, observation_mirror, read_mirror
from canter.modules.distributions import Beta, Categorical, Gaussian, MultiCategorical, SquashedGaussian
from canter.utils.obs_layout import ObsLayout

LEGS = ObsLayout({"velocity": (3,), "left": (2,), "right": (2,), "height": (4,)})
MIRRORS = {
    "velocity": [1, -1, 1],
    "left": {"pair": "right", "signs": [1, -1]},
    "right": {"pair": "left", "signs": [1, -1]},
    "height": {"permutation": [1, 0, 3, 2]},
}


def test_an_observation_is_mirrored_component_by_component():
    mirror = observation_mirror(LEGS, MIRRORS, "obs")
    obs = torch.arange(1.0, 12.0)  # velocity 1 2 3, left 4 5, right 6 7, height 8 9 10 11
    assert mirror(obs).tolist() == [1, -2, 3, 6, -7, 4, -5, 9, 8, 11, 10]
    assert torch.equal(mirror(mirror(obs)), obs)
    batch = torch.randn(5, 4, 11)
    assert torch.equal(mirror(batch)[2, 3], mirror(batch[2, 3]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"velocity": None}, r"missing \['velocity'\]"),
        ({"tail": "same"}, r"unknown \['tail'\]"),
        ({"velocity": [1, -1]}, "signs of obs 'velocity' has 2 entries for 3 values"),
        ({"velocity": [1, -2, 1]}, "has the sign -2.0 at 1; signs are 1 and -1"),
        ({"velocity": "none"}, "the mirror of obs 'velocity' is 'none'; give 'same'"),
        ({"velocity": {"sign": [1, 1, 1]}}, "did you mean 'signs'"),
        ({"height": {"permutation": [1, 2, 3, 0]}}, "applied twice, does not give entry 7 back"),
        ({"height": {"permutation": [0, 0, 3, 2]}}, "is no permutation of 0..10"),
        ({"left": "same"}, "'right' is paired with 'left', but that is not paired with 'right'"),
        ({"right": {"pair": "left", "signs": [1, 1]}}, "applied twice"),
        ({"left": {"pair": "height"}}, "'left' of 2 values is paired with 'height'"),
        ({"left": {"pair": "tail"}}, "is paired with 'tail', which is not of that size"),
    ],
)
def test_a_mirror_that_cannot_be_one_is_refused(change, message):
    given = {name: value for name, value in {**MIRRORS, **change}.items() if value is not None}
    with pytest.raises((ValueError, TypeError), match=message):
        observation_mirror(LEGS, given, "obs")


def test_mirrors_of_observations_are_given_by_component():
    with pytest.raises(ValueError, match=r"given by component, got \[1, 1\]; the components are \['velocity'"):
        observation_mirror(LEGS, [1, 1], "obs")


def test_only_flat_observations_have_a_mirror():
    with pytest.raises(TypeError, match="flat observations, got a dict"):
        Mirror([0], [1], "obs")({"a": torch.zeros(1)})


def test_same_is_the_mirror_that_changes_nothing():
    assert read_mirror("same", 2, "x") == ([0, 1], [1.0, 1.0])
    assert read_mirror({}, 2, "x") == ([0, 1], [1.0, 1.0])


SWAP = {"permutation": [1, 0, 2], "signs": [-1, -1, 1]}
LOW, HIGH = [-1.0, -3.0, 0.0], [3.0, 1.0, 5.0]  # those of 0 and 1 are each other's image


def concentrations(*shape):
    return {name: 1 + 4 * torch.rand(shape) for name in ("alpha", "beta")}


@pytest.mark.parametrize(
    ("distribution", "given", "params"),
    [
        (Gaussian(3), SWAP, {"mu": torch.randn(50, 3), "sigma": torch.rand(50, 3) + 0.1}),
        (Gaussian(3), SWAP, {"mu": torch.randn(50, 3), "sigma": torch.rand(3) + 0.1}),
        (SquashedGaussian(LOW, HIGH), SWAP, {"mu": torch.randn(50, 3), "sigma": torch.rand(50, 3) + 0.1}),
        (Beta(LOW, HIGH), SWAP, concentrations(50, 3)),
        (Categorical(3), {"permutation": [2, 1, 0]}, {"logits": torch.randn(50, 3)}),
    ],
    ids=["gaussian", "shared_noise", "squashed", "beta", "categorical"],
)
def test_a_mirrored_distribution_is_that_of_the_mirrored_action(distribution, given, params):
    mirror = ActionMirror(distribution, given, "cpu")
    actions = distribution.sample(params)
    image, image_params = mirror.actions(actions), mirror.params(params)
    torch.testing.assert_close(distribution.log_prob(image_params, image), distribution.log_prob(params, actions))
    torch.testing.assert_close(distribution.entropy(image_params), distribution.entropy(params))
    assert not torch.equal(image, actions)
    torch.testing.assert_close(mirror.actions(image), actions)  # twice is not at all
    for name, value in mirror.params(image_params).items():
        assert torch.equal(value, params[name])
    if distribution.action_dtype.is_floating_point:
        plain = Mirror(given["permutation"], given["signs"], "actions")
        torch.testing.assert_close(distribution.to_env(image), plain(distribution.to_env(actions)), atol=1e-5, rtol=0)
    assert mirror.difference(distribution, image_params, mirror.params(params)).abs().max() == 0
    assert (mirror.difference(distribution, image_params, params) > 0).any()


def test_a_mirrored_choice_is_the_permuted_one():
    mirror = ActionMirror(Categorical(3), {"permutation": [2, 1, 0]}, "cpu")
    assert mirror.actions(torch.tensor([0, 1, 2])).tolist() == [2, 1, 0]
    assert mirror.params({"logits": torch.tensor([5.0, 6.0, 7.0])})["logits"].tolist() == [7.0, 6.0, 5.0]


@pytest.mark.parametrize(
    ("distribution", "given", "message"),
    [
        (MultiCategorical([2, 2]), "same", "not for MultiCategorical"),
        (Categorical(2), [1, -1], "a choice has no sign"),
        (Gaussian(2), [1, -1, 1], "signs of actions has 3 entries for 2 values"),
        (SquashedGaussian(np.array([0.0]), np.array([1.0])), [-1], r"action 0 are \[0.0, 1.0\], its mirror image's"),
        (Beta([-1.0, -2.0], [1.0, 2.0]), {"permutation": [1, 0]}, "bounds of action 0"),
    ],
)
def test_actions_that_cannot_be_mirrored_are_refused(distribution, given, message):
    with pytest.raises(ValueError, match=message):
        ActionMirror(distribution, given, "cpu")
