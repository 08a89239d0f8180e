"""Mirrors and their checks, mirrored distributions, losses and memories of mirror images."""

import numpy as np
import pytest
import torch
from torch import nn

from canter.algorithms.ppo import PPO
from canter.algorithms.symmetry import ActionMirror, Mirror, observation_mirror
from canter.envs.torch_envs import PointRobot
from canter.modules.actor_critic import ActorCritic
from canter.modules.distributions import Beta, Categorical, Gaussian, MultiCategorical, SquashedGaussian
from canter.utils.obs_layout import ObsLayout

MIRROR = {"obs": {"obs": [1, -1, -1]}, "critic_obs": {"obs": [1, 1, 1, -1, -1]}, "actions": [1, -1]}


def odd_policy():
    """Actor and critic for which the image of the output is the output for the image, under a change of all signs."""
    torch.manual_seed(0)
    policy = ActorCritic(3, 5, 2, actor_hidden_dims=(8,), critic_hidden_dims=(8,), activation="tanh")
    for name, parameter in policy.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    nn.init.zeros_(policy.critic[-1].weight)
    return policy


def batch_of(alg):
    (batch,) = alg.mini_batches()
    return batch


def test_augmented_losses_are_the_mean_of_both_images(make_ppo, collect, policy_output):
    alg, env = make_ppo(symmetry_cfg=MIRROR)
    collect(alg, env)
    batch = batch_of(alg)
    image = alg.symmetry.mirrored(batch)
    both = [alg.ppo_terms(b, policy_output(alg, b)) for b in (batch, image)]
    given = alg.compute_losses(batch)
    for name in ("surrogate_loss", "value_loss"):
        assert both[0].losses[name] != both[1].losses[name]
        torch.testing.assert_close(given.losses[name], (both[0].losses[name] + both[1].losses[name]) / 2)
    assert given.losses["entropy"] == both[0].losses["entropy"]
    assert given.stats["approx_kl"] == both[0].stats["approx_kl"] == 0  # statistics are those of what was done
    assert torch.equal(image.obs, batch.obs * torch.tensor([1.0, -1.0, -1.0]))
    assert torch.equal(image.critic_obs, batch.critic_obs * torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]))
    assert torch.equal(image.actions, batch.actions * torch.tensor([1.0, -1.0]))
    assert torch.equal(image.old_actions_log_prob, batch.old_actions_log_prob)


def test_the_mirror_loss_is_the_squared_difference_of_means(make_ppo, collect, policy_output):
    alg, env = make_ppo(symmetry_cfg={**MIRROR, "augment": False, "mirror_loss_coef": 0.5})
    collect(alg, env)
    batch = batch_of(alg)
    given = alg.compute_losses(batch).losses
    flipped = batch.obs * torch.tensor([1.0, -1.0, -1.0])
    mean, image = (alg.policy(obs, batch.critic_obs).mean for obs in (batch.obs, flipped))
    expected = (image - mean * torch.tensor([1.0, -1.0])).square().sum(-1).mean()
    torch.testing.assert_close(given["mirror_loss"], expected)
    plain = alg.loss_terms(batch, policy_output(alg, batch)).losses
    assert given["surrogate_loss"] == plain["surrogate_loss"]
    total = plain["surrogate_loss"] + plain["value_loss"] + 0.5 * expected
    torch.testing.assert_close(alg.weighted_sum(given), total)


def test_the_mirror_loss_moves_the_image_towards_the_original_alone(make_ppo, collect):
    """A linear mean: the gradient of (W x' - M W x)^2 is 2 (W x' - M W x) x', without a part through W x."""
    policy = ActorCritic(3, 5, 2, actor_hidden_dims=(), critic_hidden_dims=())
    alg, env = make_ppo(policy=policy, symmetry_cfg={**MIRROR, "augment": False, "mirror_loss_coef": 0.5})
    collect(alg, env)
    batch, layer = batch_of(alg), policy.actor[-1]
    (grad,) = torch.autograd.grad(alg.compute_losses(batch).losses["mirror_loss"], [layer.weight])
    flipped, sign = batch.obs * torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0, -1.0])
    difference = (layer(flipped) - sign * layer(batch.obs)).detach()
    torch.testing.assert_close(grad, 2 * difference.T @ flipped / len(flipped))


def test_a_symmetric_policy_has_no_mirror_loss_and_the_same_losses_on_both_sides(make_ppo, collect, policy_output):
    every = {"obs": {"obs": [-1] * 3}, "critic_obs": {"obs": [-1] * 5}, "actions": [-1, -1], "mirror_loss_coef": 1.0}
    alg, env = make_ppo(policy=odd_policy(), symmetry_cfg=every, use_clipped_value_loss=False)
    collect(alg, env)
    batch = batch_of(alg)
    given, plain = alg.compute_losses(batch).losses, alg.loss_terms(batch, policy_output(alg, batch)).losses
    assert given["mirror_loss"] < 1e-12
    torch.testing.assert_close(given["surrogate_loss"], plain["surrogate_loss"])


@pytest.mark.parametrize("kind", ["mlp", "lstm", "beta", "discrete"])
def test_the_mirror_loss_makes_a_policy_symmetric(make_ppo, collect, kind):
    actions = {"permutation": [1, 0, 3, 2]} if kind == "discrete" else [1, -1]
    cfg = {**MIRROR, "actions": actions, "augment": False, "mirror_loss_coef": 100.0}
    alg, env = make_ppo(kind, symmetry_cfg=cfg, learning_rate=3e-3, num_learning_epochs=20)
    losses = []
    for iteration in range(4):
        collect(alg, env)
        losses.append(alg.update(iteration)[0]["mirror_loss"])
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["lstm", "gru", "lstm_beta"])
def test_memories_of_mirror_images_follow_the_rollout(make_ppo, collect, noise_env, kind, policy_output):
    """Learning's sequences of images say what a policy that sees the images step by step says."""
    alg, env = make_ppo(kind, 4, 6, symmetry_cfg=MIRROR, num_mini_batches=2)
    hidden = alg.policy.initial_hidden(4)
    flips, critic_flips = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    for _ in range(2):
        collect(alg, env)
        stepped = []
        for t in range(6):
            out = alg.policy(
                alg.rollout.observations[t] * flips, alg.rollout.privileged_observations[t] * critic_flips, hidden
            )
            stepped.append({**out.params, "value": out.value})
            ended = alg.rollout.dones[t].view(-1, 1, 1, 1)
            hidden = {name: state.masked_fill(ended, 0.0) for name, state in out.hidden.items()}
        for envs, total in alg.rollout.env_minibatches(2):
            image = alg.symmetry.mirrored(alg.rollout.take_envs(envs, total))
            out = policy_output(alg, image)
            for name, value in {**out.params, "value": out.value}.items():
                expected = torch.stack([step[name].expand(4, value.shape[-1]) for step in stepped])[:, envs]
                torch.testing.assert_close(value.expand_as(expected), expected, atol=1e-5, rtol=1e-5)
        alg.rollout.clear()
    assert any((state != 0).any() for name, state in hidden.items())


def test_a_second_learner_on_the_same_policy_does_not_mirror_mirrors(make_ppo):
    alg, _ = make_ppo("lstm", symmetry_cfg=MIRROR)
    PPO(alg.policy, symmetry_cfg=MIRROR)
    assert set(alg.policy.memories) == {"memory_a", "memory_c", "mirrored_memory_a", "mirrored_memory_c"}


def test_observation_statistics_become_symmetric(make_ppo, collect):
    alg, env = make_ppo(symmetry_cfg=MIRROR, empirical_normalization=True)
    collect(alg, env)
    alg.update(0)
    assert alg.obs_normalizer.mean[1:].abs().max() < 1e-6
    assert alg.obs_normalizer.mean[0].abs() > 0.1
    assert alg.critic_obs_normalizer.mean[3:].abs().max() < 1e-6


def test_components_are_those_of_the_environment():
    env = PointRobot(2)
    policy = ActorCritic(6, 9, 2, obs_segments=env.obs_segments, critic_obs_segments=env.critic_obs_segments)
    flip = {"velocity": [1, -1], "command": [1, -1], "last_action": [1, -1]}
    critic = {**flip, "true_velocity": [1, -1], "friction": "same"}
    made = PPO(policy, symmetry_cfg={"obs": flip, "critic_obs": critic, "actions": [1, -1]}).symmetry
    assert made.critic_obs.sign.tolist() == [1, -1, 1, -1, 1, -1, 1, -1, 1]
    with pytest.raises(ValueError, match="give symmetry_cfg critic_obs mirrors"):
        PPO(policy, symmetry_cfg={"obs": flip, "actions": [1, -1]}).symmetry
    with pytest.raises(
        ValueError, match=r"critic_obs has a mirror for each .* missing \['friction', 'true_velocity'\]"
    ):
        PPO(policy, symmetry_cfg={"obs": flip, "critic_obs": flip, "actions": [1, -1]}).symmetry


def test_a_symmetry_that_does_nothing_or_is_misspelt_is_refused(make_ppo):
    with pytest.raises(ValueError, match="neither augments nor has a mirror_loss_coef"):
        make_ppo(symmetry_cfg={**MIRROR, "augment": False})
    with pytest.raises(TypeError, match="'mirror_loss_coef'"):
        make_ppo(symmetry_cfg={**MIRROR, "mirror_los_coef": 1.0})
    with pytest.raises(ValueError, match="symmetry needs flat observations, which ActorCritic"):
        make_ppo("dict", symmetry_cfg=MIRROR)


def test_an_actor_and_a_critic_given_apart_call_their_observation_obs(make_ppo):
    from gymnasium import spaces

    from canter.modules.actors import MLPActor, MLPCritic
    from canter.modules.build import build_pair

    space = spaces.Box(-1, 1, (3,))
    pair = build_pair(space, space, spaces.Box(-1, 1, (2,)), MLPActor, MLPCritic)
    made = PPO(pair, symmetry_cfg={"obs": {"obs": [1, -1, 1]}, "actions": [1, -1]}).symmetry
    assert made.critic_obs.sign.tolist() == [1, -1, 1]


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
        ({"velocity": {"sign": [1, 1, 1]}}, "'signs'"),
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
