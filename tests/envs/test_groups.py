import pytest
import torch

from canter.envs.groups import checked_segments, join_groups, resolve_sets, split_groups

A, B, C = torch.full((2, 1), 1.0), torch.full((2, 2), 2.0), torch.full((2, 3), 3.0)
IMAGE = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


def test_a_tensor_is_both_observations():
    actor, critic = split_groups(A)
    assert actor is A
    assert critic is A


@pytest.mark.parametrize("actor", ["obs", "policy", "actor"])
@pytest.mark.parametrize("critic", ["privileged_obs", "critic_obs", "critic"])
def test_groups_are_known_by_name(actor, critic):
    assert split_groups({actor: A, critic: B, "other": C}) == (A, B)


def test_a_missing_critic_group_is_the_actors():  # row E02
    actor, critic = split_groups({"policy": A, "critic": None})
    assert actor is A
    assert critic is A


def test_the_playground_pair_needs_both_names():
    assert split_groups({"state": A, "privileged_state": B}) == (A, B)
    dict_obs = {"state": A, "image": IMAGE}
    assert split_groups(dict_obs) == (dict_obs, dict_obs)


def test_privileged_obs_is_preferred_to_critic_obs():
    assert split_groups({"obs": A, "critic_obs": B, "privileged_obs": C})[1] is C


def test_obs_groups_choose():
    groups = {"policy": A, "critic": B, "terrain": C}
    assert resolve_sets(groups, {"actor": ["policy", "terrain"]}) == (["policy", "terrain"], ["critic"])
    assert resolve_sets(groups, {"policy": ["terrain"], "critic": ["policy"]}) == (["terrain"], ["policy"])
    with pytest.raises(KeyError, match="asks for the group 'hights'; the environment gives"):
        resolve_sets(groups, {"critic": ["hights"]})


def test_vectors_are_joined_in_order_with_their_segments():
    joined, segments = join_groups({"x": C, "y": {"p": A, "q": B}}, ["y", "x"])
    assert joined[0].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert segments == {"p": (1,), "q": (2,), "x": (3,)}
    assert list(segments) == ["p", "q", "x"]


def test_names_that_occur_twice_keep_their_path():
    _, segments = join_groups({"x": {"v": A}, "y": {"v": B}}, ["x", "y"])
    assert segments == {"x.v": (1,), "y.v": (2,)}


def test_one_image_makes_a_dict():
    joined, segments = join_groups({"policy": A, "camera": IMAGE}, ["policy", "camera"])
    assert joined == {"policy": A, "camera": IMAGE}
    assert segments is None


def test_segments_must_fill_the_observation():
    assert checked_segments({"a": 2, "b": (3, 2)}, 8, "obs_segments") == {"a": (2,), "b": (3, 2)}
    with pytest.raises(ValueError, match=r"obs_segments add up to 8 values \(a 2, b 6\), but the observation has 9"):
        checked_segments({"a": 2, "b": (3, 2)}, 9, "obs_segments")
