"""EstimatorPPO: one supervised loss per estimate, in the scale that the actor sees."""

import pytest
import torch
from policy_table import PRESETS, KitEnv, build_algorithm

from canter.algorithms.estimator import EstimatorPPO
from canter.modules.actor_critic import ActorCritic
from canter.modules.state_estimator import StateAc
from canter.storage.rollout_storage import masked_mean

CASES = {case.id: case for case in PRESETS}
ESTIMATING = [case for case in PRESETS if "State" in case.name]


def collected(collect, case="StateAc-mlp", **settings):
    env = KitEnv()
    alg = build_algorithm(CASES[case], env, **settings)
    collect(alg, env)
    return alg, env


@pytest.mark.parametrize("name", ["estimator", "adaptor"])
def test_a_weight_of_zero_teaches_nothing(collect, name):
    alg, _ = collected(collect, "PrivilegeStateAcRecurrent-lstm", **{f"{name}_loss_coef": 0.0})
    parts = {"estimator": ("state_estimator", "memory_s"), "adaptor": ("adaptor", "memory_p")}
    before = {key: value.clone() for key, value in alg.policy.state_dict().items()}
    alg.update(0)
    for which, prefixes in parts.items():
        names = [key for key in before if key.startswith(prefixes)]
        same = [torch.equal(before[key], alg.policy.state_dict()[key]) for key in names]
        assert len(names) == 8
        assert all(same) if which == name else not any(same)


@pytest.mark.parametrize("case", ESTIMATING, ids=lambda case: case.id)
def test_an_update_brings_every_estimate_nearer(collect, case, minibatch_step):
    env = KitEnv()
    alg = build_algorithm(case, env, num_mini_batches=1)
    collect(alg, env)
    (batch,) = alg.mini_batches()
    before = {name: loss.item() for name, loss in alg.compute_losses(batch).losses.items()}
    for _ in range(25):
        minibatch_step(alg, batch)
    after = alg.compute_losses(batch).losses
    for name in alg.policy.estimates:
        assert after[f"{name}_loss"] < 0.7 * before[f"{name}_loss"], name
    assert alg.update(0)[1]["estimator_error"] > 0


def test_targets_are_normalised_as_the_actor_sees_the_component(collect):
    alg, env = collected(collect, "PrivilegeStateAc-mlp", empirical_normalization=True)
    alg.update(0)
    collect(alg, env)
    (batch, *_) = alg.mini_batches()
    estimates = alg.policy.estimates
    by_actor = alg.policy.obs_normalizer.normalize(batch.obs)[:, 47:]  # vel, the same in both
    torch.testing.assert_close(alg.estimator_target(batch, estimates["estimator"]), by_actor)
    by_critic = alg.policy.critic_obs_normalizer.normalize(batch.critic_obs)[:, :2]  # push, which the actor lacks
    torch.testing.assert_close(alg.estimator_target(batch, estimates["adaptor"]), by_critic)


def test_targets_that_only_the_actor_has_come_from_it():
    policy = StateAc(
        3, 2, 1, obs_segments={"a": 1, "b": 2}, critic_obs_segments={"c": 2}, estimator_target_components=["b"]
    )
    alg = EstimatorPPO(policy)
    alg.init_storage(2, 1, [3], [2], [1])
    obs = torch.arange(6.0).view(2, 3)
    alg.act(obs, torch.zeros(2, 2))
    alg.process_env_step(torch.zeros(2), torch.zeros(2), {})
    (batch,) = alg.mini_batches()
    assert alg.estimator_target(batch, policy.estimates["estimator"]).sort(0).values.tolist() == [[1, 2], [4, 5]]


def test_steps_that_do_not_count_teach_nothing(collect):
    alg, _ = collected(collect)
    (batch, *_) = alg.mini_batches()
    batch.valid = torch.arange(len(batch.obs)) % 2 == 0
    out = alg.policy(batch.obs, batch.critic_obs, random_masks=batch.random_masks)
    error = (out.aux["estimated_state"] - batch.critic_obs[:, 2:4]).square().sum(-1)
    torch.testing.assert_close(alg.loss_terms(batch, out).losses["estimator_loss"], masked_mean(error, batch.valid))


def test_a_policy_that_does_not_estimate_is_refused():
    with pytest.raises(
        TypeError, match="EstimatorPPO needs a policy that estimates, such as StateAc; ActorCritic does"
    ):
        EstimatorPPO(ActorCritic(3, 3, 1))


@pytest.mark.parametrize("name", ["mse", "relu", "interpolate", "_Reduction"])
def test_a_loss_that_is_none_is_refused(name):
    policy = StateAc(3, 3, 1, obs_segments={"a": 1, "b": 2}, estimator_target_components=["b"])
    with pytest.raises(ValueError, match="estimator_loss_func must name a loss of torch.nn.functional"):
        EstimatorPPO(policy, estimator_loss_func=name)


@pytest.mark.parametrize("case", ["StateAc-mlp", "PrivilegeStateAcRecurrent-lstm"])
def test_a_large_loss_of_an_estimate_leaves_the_policys_step_as_it_is(collect, case):
    """Clipped together, its gradients would shrink those of actor and critic."""
    steps, one = (
        {},
        {"num_learning_epochs": 1, "num_mini_batches": 1},
    )  # in a second step the actor sees other estimates
    for weight in (0.0, 1e4):
        torch.manual_seed(0)
        alg, _ = collected(collect, case, estimator_loss_coef=weight, max_grad_norm=0.1, **one)
        alg.update(0)
        steps[weight] = {name: p.detach().clone() for name, p in alg.policy.named_parameters()}
    apart = ("state_estimator.", "memory_s.")
    for name, still in steps[0.0].items():
        if name.startswith(apart):
            assert not torch.equal(still, steps[1e4][name]), name
        elif not name.startswith(("adaptor.", "memory_p.")):  # clipped apart too
            torch.testing.assert_close(still, steps[1e4][name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_algorithm_names_the_components_of_the_estimator(collect):
    alg = collected(collect)[0]
    assert alg.estimator_obs_components == alg.policy.estimator_obs_components == ["pos", "window"]
    assert alg.estimator_target_obs_components == ["vel"]
