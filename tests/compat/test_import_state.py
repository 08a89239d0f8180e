"""Checkpoints in the layouts of other libraries."""

import copy

import pytest
import torch

from canter.compat.checkpoints import import_state


def without(state, *prefixes):
    return {name: value for name, value in state.items() if not name.startswith(prefixes)}


def only(state, prefix):
    return {name[len(prefix) + 1 :]: value for name, value in state.items() if name.startswith(prefix + ".")}


@pytest.fixture
def saved(make_ppo, collect):
    """`saved(kind)`: a trained PPO and a copy of its state."""

    def train(kind, **settings):
        alg, env = make_ppo(kind, **settings)
        collect(alg, env)
        alg.update(0)
        return alg, copy.deepcopy(alg.state_dict())

    return train


def test_a_separate_actor_and_critic_are_one_model(make_ppo, saved, snapshot, differing):
    alg, state = saved("dict")
    model = state.pop("model_state_dict")
    state["actor_state_dict"], state["critic_state_dict"] = only(model, "actor"), only(model, "critic")
    other, _ = make_ppo("dict", seed=5)
    with torch.no_grad():
        for p in other.policy.parameters():
            p.zero_()
    other.load_state_dict(state)
    assert differing(snapshot(alg), snapshot(other)) == []


def test_separate_normalisers_join_the_model(make_ppo, saved, snapshot, differing):
    alg, state = saved("mlp", empirical_normalization=True)
    model = state["model_state_dict"]
    state["obs_norm_state_dict"] = only(model, "obs_normalizer")
    state["critic_obs_norm_state_dict"] = only(model, "critic_obs_normalizer")
    state["model_state_dict"] = without(model, "obs_normalizer.", "critic_obs_normalizer.")
    other, _ = make_ppo("mlp", empirical_normalization=True)
    other.load_state_dict(state)
    assert other.obs_normalizer.count == 24
    assert differing(snapshot(alg), snapshot(other)) == []


def test_empty_normalisers_of_a_run_without_them_are_no_difference(make_ppo, saved):
    alg, state = saved("mlp")
    state["obs_norm_state_dict"] = state["critic_obs_norm_state_dict"] = {}
    other, _ = make_ppo("mlp")
    other.load_state_dict(state)
    assert torch.equal(other.policy.std, alg.policy.std)


def test_normalisers_of_a_file_are_refused_where_normalisation_is_off(make_ppo, saved):
    alg, state = saved("mlp", empirical_normalization=True)
    state["obs_norm_state_dict"] = only(state["model_state_dict"], "obs_normalizer")
    state["model_state_dict"] = without(state["model_state_dict"], "obs_normalizer.", "critic_obs_normalizer.")
    other, _ = make_ppo("mlp")
    with pytest.raises(ValueError, match="has statistics for obs_normalizer.*set empirical_normalization=True"):
        other.load_state_dict(state)


def test_the_iteration_gets_our_name_and_nothing_given_is_changed():
    state = {"model_state_dict": {"x": 1}, "iteration": 7, "obs_norm_state_dict": {"y": 2}}
    before = copy.deepcopy(state)
    assert import_state(state) == {"model_state_dict": {"x": 1, "obs_normalizer.y": 2}, "iter": 7}
    assert state == before
    assert import_state({"model_state_dict": {}, "iter": 3, "iteration": 4})["iter"] == 3
