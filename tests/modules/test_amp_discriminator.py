"""The discriminator of motion: its shape, its penalty, its rewards, and the policies that carry one."""

import math

import pytest
import torch
from torch import nn

from canter.modules.amp_discriminator import LOSSES, AmpActorCritic, AMPDiscriminator

CFG = {"input_dim": 6, "style_reward_coef": 2.0, "hidden_dims": [8, 4]}


def constant(value, **settings):
    """A discriminator whose output is `value` everywhere."""
    made = AMPDiscriminator(3, 2.0, [4], **settings)
    nn.init.zeros_(made.head.weight)
    nn.init.constant_(made.head.bias, value)
    return made


def linear(weights, **settings):
    made = AMPDiscriminator(len(weights), 1.0, [], **settings)
    with torch.no_grad():
        made.head.weight.copy_(torch.tensor([weights]))
    return made


@pytest.mark.parametrize("shape", [(10, 3), (5, 2, 3)])
def test_the_gradient_penalty_of_a_plane_is_its_slope_squared(shape):
    made = linear([1.0, 2.0, -2.0], discriminator_grad_pen=5.0)
    penalty = made.compute_grad_pen(torch.randn(shape))
    assert penalty.item() == pytest.approx(5.0 * 9.0)
    penalty.backward()
    assert made.head.weight.grad.tolist() == [pytest.approx([10.0, 20.0, -20.0])]


def test_a_task_reward_of_another_shape_than_the_style_reward_is_refused():
    with pytest.raises(ValueError, match=r"must have the shape \(2,\) of the style reward, got \(1, 2\)"):
        constant(1.0, task_reward_lerp=0.8).predict_style_reward(torch.randn(2, 3), torch.ones(1, 2))


def test_a_task_reward_with_a_column_per_step_gives_results_with_one():
    task = torch.tensor([[10.0], [20.0]])
    style, same, total = constant(1.0, task_reward_lerp=0.8).predict_style_reward(torch.randn(2, 3), task)
    assert style.shape == total.shape == (2, 1)
    assert same is task
    assert torch.allclose(total, 0.2 * style + 0.8 * task)


@pytest.mark.parametrize(("d", "style"), [(1.0, 2.0), (-1.0, 0.0), (0.0, 1.5), (-3.0, 0.0), (3.0, 0.0)])
def test_the_least_squares_reward(d, style):
    task = torch.tensor([10.0, 20.0])
    got, raw, total = constant(d, task_reward_lerp=0.8).predict_style_reward(torch.randn(2, 3), task)
    assert got.tolist() == pytest.approx([style] * 2)
    assert raw.tolist() == [10.0, 20.0]
    assert total.tolist() == pytest.approx([0.2 * style + 8.0, 0.2 * style + 16.0])


def test_style_alone_is_the_default_and_warns_once():
    made = constant(1.0)
    with pytest.warns(UserWarning, match="task_reward_lerp is 0") as caught:
        totals = [made.predict_style_reward(torch.randn(1, 3), torch.tensor([9.0]))[2] for _ in range(3)]
    assert len(caught) == 1
    assert [float(t) for t in totals] == [2.0, 2.0, 2.0]


def test_the_style_reward_has_the_time_scale_of_the_task_reward():  # by dt
    plain, scaled = (constant(1.0, task_reward_lerp=0.5, style_dt=dt) for dt in (1.0, 0.02))
    task = torch.tensor([0.0])
    assert float(plain.predict_style_reward(torch.randn(1, 3), task)[2]) == 1.0
    assert float(scaled.predict_style_reward(torch.randn(1, 3), task)[2]) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("loss_type", "bounds"), [("lsgan", (0.0, 1.0)), ("bce", (0.0, -math.log(1e-4))), ("wgan", (1 / math.e, math.e))]
)
def test_every_reward_is_bounded_and_grows_towards_the_expert(loss_type, bounds):
    loss = LOSSES[loss_type]
    d = torch.linspace(-1.0, 1.0, 21)
    assert (loss.reward(d).diff() > 0).all()
    far = loss.reward(torch.tensor([-1e6, 1e6, -1e2, 1e2]))
    assert torch.isfinite(far).all()
    assert (far >= bounds[0] - 1e-6).all()
    assert (far <= bounds[1] + 1e-4).all()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_both_losses_fall_towards_the_right_answer(loss_type):
    loss = LOSSES[loss_type]
    d = torch.tensor([0.0], requires_grad=True)
    (expert,) = torch.autograd.grad(loss.expert(d).sum(), d)
    (policy,) = torch.autograd.grad(loss.policy(d).sum(), d)
    assert float(expert) < 0 < float(policy)


def test_the_least_squares_losses_by_hand():
    made = linear([1.0], discriminator_grad_pen=10.0)
    nn.init.zeros_(made.head.bias)
    losses, stats = made.adversarial_losses(
        torch.tensor([[2.0], [0.5]]), torch.tensor([[-2.0], [1.0], [50.0]]), torch.tensor([True, True, False])
    )
    assert float(losses["discriminator_expert_loss"]) == pytest.approx(0.5 * (1.0 + 0.25) / 2)
    assert float(losses["discriminator_policy_loss"]) == pytest.approx(0.5 * (1.0 + 4.0) / 2)
    assert float(losses["discriminator_grad_pen_loss"]) == pytest.approx(10.0)
    got = {name: float(value) for name, value in stats.items()}
    assert got == pytest.approx(
        {
            "amp/expert_d": 1.25,
            "amp/policy_d": -0.5,
            "amp/expert_accuracy": 1.0,
            "amp/policy_accuracy": 0.5,
            "amp/accuracy": 0.75,
            "amp/saturation": 0.5,
        }
    )


def test_the_same_features_get_the_same_reward_alone_and_among_experts():  # no statistics of a batch
    made = AMPDiscriminator(**CFG, task_reward_lerp=0.5)
    policy, expert = torch.randn(4, 6), torch.randn(4, 6)
    alone = made(policy)
    torch.testing.assert_close(made(torch.cat([policy, expert]))[:4], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task_reward_lerp": 1.5}, "task_reward_lerp must be from 0"),
        ({"loss_type": "hinge"}, "lsgan, bce, wgan"),
        ({"amp_obs_dim": 7}, "amp_obs_dim is 7"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AMPDiscriminator(**CFG, **settings)


def test_a_missing_or_misspelt_discriminator_setting_is_named():
    with pytest.raises(ValueError, match="amp_discriminator needs input_dim, style_reward_coef, hidden_dims"):
        AmpActorCritic(3, 2)
    with pytest.raises(ValueError, match="needs style_reward_coef"):
        AmpActorCritic(3, 2, amp_discriminator={"input_dim": 3, "hidden_dims": [4]})
    with pytest.raises(TypeError, match="'loss_type'"):
        AmpActorCritic(3, 2, amp_discriminator={**CFG, "loss_typ": "bce"})
