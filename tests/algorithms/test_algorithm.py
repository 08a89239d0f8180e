"""Saving and loading: all or nothing, bit for bit, and errors that name every difference."""

import copy
import warnings

import pytest
import torch

from canter.algorithms import PPO
from canter.algorithms.algorithm import Algorithm
from canter.modules.actor_critic import ActorCritic

ON = {"empirical_normalization": True, "normalize_rewards": True, "schedule": "adaptive"}


@pytest.fixture
def trained(make_ppo, collect):
    """`trained(kind, **settings)`: a PPO after two iterations."""

    def train(kind="mlp", **settings):
        alg, env = make_ppo(kind, num_mini_batches=2, **settings)
        for iteration in range(2):
            collect(alg, env)
            alg.update(iteration)
        return alg, env

    return train


def test_what_is_saved_is_what_is_switched_on(make_ppo):
    plain, _ = make_ppo()
    assert set(plain.state_dict()) == {"model_state_dict", "optimizer_state_dict", "learning_rate"}
    assert not any("normalizer" in name for name in plain.state_dict()["model_state_dict"])
    full, _ = make_ppo(rnd_cfg={"weight": 1.0}, **ON)
    assert set(full.state_dict()) - set(plain.state_dict()) == {
        "rnd_state_dict",
        "rnd_optimizer_state_dict",
        "return_scaler_state_dict",
    }
    names = set(full.state_dict()["model_state_dict"])
    assert {"obs_normalizer._mean", "obs_normalizer.count", "critic_obs_normalizer._std"} <= names


@pytest.mark.parametrize("kind", ["mlp", "lstm", "discrete", "dict"])
def test_a_round_trip_restores_every_bit(make_ppo, trained, snapshot, differing, kind):
    alg, _ = trained(kind, **ON)
    other, _ = make_ppo(kind, seed=9, policy=None, **ON)
    with torch.no_grad():
        for p in other.policy.parameters():
            p.add_(1.0)
    state = copy.deepcopy(alg.state_dict())
    other.load_state_dict(state)
    assert differing(snapshot(alg), snapshot(other)) == []
    assert len(snapshot(alg)) > 20


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_training_goes_on_bit_for_bit_after_a_load(make_ppo, trained, collect, noise_env, snapshot, differing, name):
    alg, _ = trained(optimizer_class_name=name, **ON)
    other, _ = make_ppo(num_mini_batches=2, optimizer_class_name=name, **ON)
    other.load_state_dict(copy.deepcopy(alg.state_dict()))
    other.load_resume_state(alg.resume_state())
    for a in (alg, other):
        collect(a, noise_env(seed=77))
        a.update(2)
    assert differing(snapshot(alg), snapshot(other)) == []


def test_the_adapted_learning_rate_survives(make_ppo, collect, trained, minibatch_step):
    alg, _ = trained(schedule="adaptive")
    alg.lr.fill_(3.3e-4)
    alg.learning_rate = 3.3e-4
    other, env = make_ppo(schedule="adaptive", learning_rate=1e-3)
    rate = other.lr
    other.load_state_dict(copy.deepcopy(alg.state_dict()))
    assert other.lr is rate is other.optimizer.optimizer.param_groups[0]["lr"]
    assert other.learning_rate == pytest.approx(3.3e-4)
    other.adapt_learning_rate(torch.tensor(other.desired_kl))  # neither too small nor too large: neutral
    collect(other, env)
    (batch,) = other.mini_batches()
    other.adapt_learning_rate = lambda kl: None
    minibatch_step(other, batch)
    assert float(other.lr) == pytest.approx(3.3e-4)


def test_the_optimizer_can_be_left_out(make_ppo, trained):
    alg, _ = trained(schedule="adaptive", rnd_cfg={"weight": 1.0})
    alg.lr.fill_(5e-5)
    other, _ = make_ppo(schedule="adaptive", rnd_cfg={"weight": 1.0})
    other.load_state_dict(alg.state_dict(), load_optimizer=False)
    assert other.state_dict()["optimizer_state_dict"]["state"] == {}
    assert other.state_dict()["rnd_optimizer_state_dict"]["state"] == {}
    assert other.learning_rate == pytest.approx(1e-3)
    assert float(other.lr) == pytest.approx(1e-3)
    assert torch.equal(other.policy.actor[0].weight, alg.policy.actor[0].weight)


def test_a_file_of_another_architecture_changes_nothing_and_names_every_difference(
    make_ppo, make_policy, trained, snapshot, differing
):
    alg, _ = trained(policy=make_policy(actor_hidden_dims=(8, 8), critic_hidden_dims=(9,)))
    other, _ = make_ppo()
    before = snapshot(other)
    with pytest.raises(RuntimeError) as error:
        other.load_state_dict(alg.state_dict())
    text = str(error.value)
    assert "does not fit ActorCritic" in text
    assert "nothing was loaded" in text
    for name in ("critic.0.weight: want (8, 5), got (9, 5)", "unexpected actor.4.weight", "actor.2.weight"):
        assert name in text
    assert differing(before, snapshot(other)) == []


def test_a_bad_optimizer_state_stops_the_load_before_the_weights(make_ppo, trained, snapshot, differing):
    alg, _ = trained()
    other, _ = make_ppo()
    before = snapshot(other)
    for spoil in ("group", "shape"):
        state = copy.deepcopy(alg.state_dict())
        if spoil == "group":
            state["optimizer_state_dict"]["param_groups"][0]["params"].pop()
        else:
            state["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.zeros(7)
        with pytest.raises(RuntimeError, match="optimizer state"):
            other.load_state_dict(state)
        assert differing(before, snapshot(other)) == []


def test_a_bad_rnd_state_stops_the_load_before_the_weights(make_ppo, trained, snapshot, differing):
    alg, _ = trained(rnd_cfg={"weight": 1.0})
    other, _ = make_ppo(rnd_cfg={"weight": 1.0})
    state = copy.deepcopy(alg.state_dict())
    state["rnd_optimizer_state_dict"]["state"][1]["exp_avg"] = torch.zeros(7)
    before = snapshot(other)
    with pytest.raises(RuntimeError, match="optimizer state"):
        other.load_state_dict(state)
    assert differing(before, snapshot(other)) == []


@pytest.mark.parametrize("kind", ["mlp", "dict"])
@pytest.mark.parametrize("saved_on", [True, False])
def test_normalisation_on_one_side_only_is_an_error(make_ppo, trained, snapshot, differing, kind, saved_on):
    alg, _ = trained(kind, empirical_normalization=saved_on)
    other, _ = make_ppo(kind, empirical_normalization=not saved_on)
    before = snapshot(other)
    with pytest.raises(ValueError, match=f"set empirical_normalization={saved_on}"):
        other.load_state_dict(alg.state_dict())
    assert differing(before, snapshot(other)) == []


def test_a_scheduler_in_the_file_is_ignored_with_a_warning(make_ppo, trained):
    alg, _ = trained()
    other, _ = make_ppo()
    state = {**alg.state_dict(), "lr_scheduler_state_dict": {"last_epoch": 3}}
    with pytest.warns(UserWarning, match="has a learning-rate scheduler, this algorithm none"):
        other.load_state_dict(state)
    assert torch.equal(other.policy.std, alg.policy.std)


@pytest.mark.filterwarnings("ignore:the checkpoint has no rnd_optimizer_state_dict")
def test_a_part_missing_in_the_file_keeps_its_fresh_state_with_a_warning(make_ppo, trained):
    alg, _ = trained()
    other, _ = make_ppo(rnd_cfg={"weight": 1.0})
    with pytest.warns(UserWarning, match="has no rnd_state_dict: it keeps its fresh state"):
        other.load_state_dict(alg.state_dict())
    assert torch.equal(other.policy.std, alg.policy.std)


def test_a_file_without_a_model_is_an_error_that_says_what_it_has(make_ppo):
    alg, _ = make_ppo()
    for state in ({"iter": 3}, {"iter": 3, "obs_norm_state_dict": {}}):
        with pytest.raises(ValueError, match="no model_state_dict; it has iter"):
            alg.load_state_dict(state)


def test_the_base_says_what_a_subclass_owes():
    base = Algorithm(None, {}, "cpu", 0, None)
    with pytest.raises(NotImplementedError):
        base.checkpoint_parts()
    with pytest.raises(ValueError, match="learn, eval, save and load of Algorithm need an env"):
        base.learn(1)


def test_a_flat_file_of_weights_alone_loads_into_a_policy(trained):
    alg, _ = trained()
    policy = ActorCritic(3, 5, 2, actor_hidden_dims=(8,), critic_hidden_dims=(8,))
    policy.load_state_dict(alg.state_dict()["model_state_dict"])
    assert torch.equal(policy.actor[0].weight, alg.policy.actor[0].weight)


def untrained(caught):
    return [str(w.message) for w in caught if "not trained" in str(w.message)]


@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_parameters_that_the_optimizer_lacks_are_named_once(make_ppo, execution):
    replaced, _ = make_ppo(execution=execution)
    unfrozen_policy = copy.deepcopy(replaced.policy)
    unfrozen_policy.actor[0].requires_grad_(False)
    unfrozen = PPO(unfrozen_policy, execution=execution)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = replaced.policy.actor[0]
        replaced.policy.actor[0] = torch.nn.Linear(layer.in_features, layer.out_features)
        unfrozen_policy.actor[0].requires_grad_(True)
        for alg in (replaced, replaced, unfrozen, unfrozen):
            alg.sync_settings()
    assert len(untrained(caught)) == 2
    assert all("2 parameters" in text and "actor.0.weight, actor.0.bias" in text for text in untrained(caught))


def test_parameters_that_are_frozen_for_a_while_are_not_called_untrained(make_ppo):
    alg, _ = make_ppo()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for is_trained in (False, True):
            alg.policy.actor.requires_grad_(is_trained)
            alg.sync_settings()
    assert untrained(caught) == []
