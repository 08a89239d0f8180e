"""Environments that misbehave: a clear error that changes nothing, or the right handling."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs.torch_envs import CartPole, PointRobot
from canter.modules.normalizer import EmpiricalNormalization
from canter.utils.checkpoint import find_checkpoints, load_checkpoint
from canter.utils.metrics import DivergedError, NonFiniteError

NORMALISED = {"empirical_normalization": True, "normalize_rewards": True}
BAD = [float("nan"), float("inf"), -float("inf")]


def snapshot(runner):
    state = runner.alg.state_dict()
    parts = ("model_state_dict", "return_scaler_state_dict")
    return {f"{part}.{name}": value.clone() for part in parts if part in state for name, value in state[part].items()}


def bad_at(step, group, value, env=2):
    """Spoil one value of a group in one environment at one step."""

    def spoil(number, answer):
        if number == step:
            answer[group].view(answer[group].shape[0], -1)[env, -1] = value

    return spoil


# ------------------------------------------------------------------ NaN and infinity
GROUPS = [
    ("obs", "obs", 11),
    ("critic", "critic_obs", 11),
    ("reward", "reward", 11),
    ("final", "final_obs", 10),  # episodes of 5 steps end with the 10th
    ("final_critic", "final_critic_obs", 10),
]


def train_into(runner, directory):
    """Train until the error comes; nothing may have been learned from what caused it."""
    runner.learn(2)
    before = snapshot(runner)
    with pytest.raises(NonFiniteError) as caught:
        runner.learn(3)
    after = snapshot(runner)
    return str(caught.value), before, after


def assert_clean(runner, directory, after):
    assert all(torch.isfinite(v).all() for v in after.values() if v.is_floating_point())  # the reward scale too
    assert np.isfinite([*runner.rewbuffer]).all()
    assert (directory / "crash" / f"model_{runner.iteration}.pt").exists()
    assert [n for n, _ in find_checkpoints(directory)] == list(range(1, runner.iteration + 1))
    for _, path in find_checkpoints(directory):
        state = load_checkpoint(path)
        assert all(torch.isfinite(v).all() for v in state["model_state_dict"].values() if v.is_floating_point())


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("group", "name", "step"), GROUPS)
def test_values_that_are_not_finite_are_named_at_once_and_never_learned_from(
    make_runner, rsl_env, tmp_path, group, name, step, value
):
    env = rsl_env(spoil=bad_at(step, group, value))
    runner = make_runner(env, tmp_path, algorithm=NORMALISED, save_interval=1)
    message, before, after = train_into(runner, tmp_path)
    assert f"'{name}' (environments 2" in message
    assert f"at step {step - 1};" in message  # counted from 0
    assert env.num_steps == step
    if group != "reward":
        assert f"features {3 if 'critic' in group else 2})" in message
    assert all(torch.equal(before[n], after[n]) for n in before if n.startswith("model_state_dict"))
    assert_clean(runner, tmp_path, after)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("group", "name", "step"),
    [
        ("obs", "observations", 11),
        ("obs", "observations", 12),  # the last of a rollout is seen by the next
        ("critic", "privileged_observations", 11),
        ("reward", "reward", 11),
        ("final_critic", "reward", 10),  # reaches the learner through the reward it is added to
    ],
)
def test_on_a_device_values_that_are_not_finite_are_named_after_the_rollout(
    make_runner, rsl_env, tmp_path, group, name, step, value
):
    """The guard of a GPU, which looks once per rollout so that no step waits."""
    runner = make_runner(rsl_env(spoil=bad_at(step, group, value)), tmp_path, algorithm=NORMALISED, save_interval=1)
    runner.stats.guard.is_immediate = False
    message, before, after = train_into(runner, tmp_path)
    assert f"'{name}" in message
    assert "(environments 2" in message
    assert runner.iteration == (3 if step == 12 else 2)
    if step != 12:  # there the values of a poisoned return were skipped one by one
        assert all(torch.equal(before[n], after[n]) for n in before if n.startswith("model_state_dict"))
    assert_clean(runner, tmp_path, after)


@pytest.mark.parametrize(("immediate", "name"), [(True, "first_obs"), (False, "observations")])
def test_a_first_observation_that_is_not_finite_is_named(make_runner, rsl_env, immediate, name):
    env = rsl_env()
    env.t[1] = float("nan")
    runner = make_runner(env)
    runner.stats.guard.is_immediate = immediate
    with pytest.raises(NonFiniteError, match=rf"'{name}' \(environments 1.*at step 0"):
        runner.learn(1)


@pytest.mark.parametrize("immediate", [True, False])
def test_after_the_environment_is_repaired_the_training_can_go_on(make_runner, rsl_env, immediate):
    runner = make_runner(rsl_env(spoil=bad_at(6, "reward", float("nan"))))
    runner.stats.guard.is_immediate = immediate
    with pytest.raises(NonFiniteError):
        runner.learn(3)
    assert runner.iteration == 1
    runner.learn(2)
    assert runner.iteration == 3
    assert np.isfinite([*runner.rewbuffer, *runner.stats.tracker.cur_reward_sum]).all()


def test_large_but_finite_values_are_no_error(make_runner, rsl_env):
    def huge(number, answer):
        answer["obs"][:, 2] = 3e38  # their sum overflows

    runner = make_runner(rsl_env(spoil=huge))
    runner.init_writer()
    runner.rollout_step(runner.obs, runner.critic_obs)
    assert runner.alg.rollout.step == 1


def test_rows_that_did_not_end_may_hold_anything_in_the_final_observation(make_runner, rsl_env):
    def garbage(number, answer):
        going = ~answer["done"]
        answer["final"][going], answer["final_critic"][going] = float("nan"), float("inf")

    make_runner(rsl_env(spoil=garbage)).learn(3)


def test_nan_in_extras_is_dropped_from_the_log_and_stops_nothing(make_runner, rsl_env, tmp_path):
    def spoil(number, answer):
        answer["extras"]["log"] = {"height": float("nan"), "speed": 1.0}

    runner = make_runner(rsl_env(spoil=spoil), tmp_path)
    runner.learn(2)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "height" not in text
    assert "extra/log/speed" in text


def test_a_loss_that_is_not_finite_takes_no_step_and_is_counted(make_runner, rsl_env):
    runner = make_runner(rsl_env())
    runner.learn(1)
    before = snapshot(runner)
    runner.add_callback("pre_update", lambda r: r.alg.rollout.returns.fill_(float("nan")))
    seen = []
    runner.add_callback("post_iteration", lambda r, stats: seen.append(stats))
    with pytest.raises(DivergedError, match="at the end of the run"):  # which a longer run would have outlived
        runner.learn(1)
    assert seen[0]["train/nonfinite_updates"] == 4
    assert all(torch.equal(before[name], value) for name, value in snapshot(runner).items())


# ------------------------------------------------------------------ shapes and kinds
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(obs=a["obs"][:, :2]), r"'policy' changed at step 7: expected .*\(4, 3\).*got .*\(4, 2\)"),
        (lambda a: a.update(obs=a["obs"].byte()), r"'policy' changed at step 7.*float32.*uint8"),
        (lambda a: a.update(critic=a["critic"][:3]), r"'critic' changed at step 7"),
        (lambda a: a["extras"].update(observations={}), r"'critic' changed at step 7.*got nothing"),
        (lambda a: a.update(reward=torch.zeros(3)), r"rewards|shape"),
        (
            lambda a: a.update(reward=torch.zeros(4, 4)),
            r"rewards of 4 environments must have shape \(4,\), got \(4, 4\)",
        ),
        (lambda a: a.update(done=torch.zeros(4, 2)), r"dones of 4 environments must have shape \(4,\), got \(4, 2\)"),
        (lambda a: a.update(final=torch.zeros(3, 3)), r"final observation has shape \(3, 3\)"),
    ],
)
def test_an_answer_of_another_shape_is_named(make_runner, rsl_env, change, message):
    runner = make_runner(rsl_env(spoil=lambda number, answer: change(answer) if number == 7 else None))
    with pytest.raises((ValueError, RuntimeError), match=message):
        runner.learn(3)
    assert runner.iteration == 1


DONES = {
    "bool": lambda done: done,
    "int64": lambda done: done.long(),
    "uint8": lambda done: done.byte(),
    "float": lambda done: done.float(),
    "column": lambda done: done.unsqueeze(1),
}


def weights_after(make_runner, env, **cfg):
    torch.manual_seed(0)
    runner = make_runner(env, seed=4, **cfg)
    runner.learn(4)
    return torch.cat([p.detach().flatten() for p in runner.policy.parameters()]), runner


@pytest.mark.parametrize("policy", [{}, {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 6}])
@pytest.mark.parametrize("kind", list(DONES))
def test_dones_of_any_kind_give_the_same_run(make_runner, rsl_env, kind, policy):
    def stagger(number, answer):
        answer["done"] = answer["done"] & (torch.arange(4) != 1)  # environment 1 goes on
        answer["extras"]["time_outs"] = answer["done"].clone()

    def spoil(number, answer):
        stagger(number, answer)
        answer["done"] = DONES[kind](answer["done"])
        answer["reward"] = answer["reward"].unsqueeze(1) if kind == "column" else answer["reward"]

    expected, reference = weights_after(make_runner, rsl_env(spoil=stagger), policy=policy)
    got, runner = weights_after(make_runner, rsl_env(spoil=spoil), policy=policy)
    assert torch.equal(got, expected)
    assert torch.equal(runner.alg.rollout.dones, reference.alg.rollout.dones)
    assert runner.alg.rollout.dones.dtype == torch.bool


def test_an_environment_that_writes_into_the_same_buffers_trains_the_same(make_runner, rsl_env):
    expected, _ = weights_after(make_runner, rsl_env())
    got, runner = weights_after(make_runner, rsl_env(reuse=True))
    assert torch.equal(got, expected)
    stored = runner.alg.rollout.observations
    assert stored[:, 0, 1].tolist() == [2.0, 3.0, 4.0, 0.0]  # steps 12 to 15 of episodes of 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_observations_of_any_number_are_taken_as_float32(make_runner, rsl_env, dtype):
    runner = make_runner(rsl_env(dtype=dtype))
    runner.learn(2)
    assert runner.alg.rollout.observations.dtype == torch.float32
    if dtype is torch.float64:
        assert torch.equal(
            weights_after(make_runner, rsl_env(dtype=dtype))[0], weights_after(make_runner, rsl_env())[0]
        )


@pytest.mark.parametrize("kind", ["expanded", "transposed", "inference", "requires_grad"])
def test_odd_tensors_are_taken_as_plain_ones(make_runner, rsl_env, kind):
    def spoil(number, answer):
        obs = answer["obs"]
        if kind == "expanded":
            answer["obs"] = obs[:1].expand(4, 3)
        elif kind == "transposed":
            answer["obs"] = obs.t().contiguous().t()
        elif kind == "requires_grad":
            answer["obs"] = obs.requires_grad_()
        else:
            with torch.inference_mode():
                answer["obs"] = obs.clone()

    def plain(number, answer):
        if kind == "expanded":
            answer["obs"] = answer["obs"][:1].repeat(4, 1)

    expected, _ = weights_after(make_runner, rsl_env(spoil=plain))
    got, _ = weights_after(make_runner, rsl_env(spoil=spoil), inference_mode_rollout=False)
    assert torch.equal(got, expected)


# ------------------------------------------------------------------ how many
@pytest.mark.parametrize(
    ("num_envs", "num_mini_batches"),
    [(1, 1), (1, 3), (3, 4), (3, 5), (2, 8)],
)
def test_any_number_of_environments_and_minibatches_uses_every_step_once(make_runner, num_envs, num_mini_batches):
    counted = {"num_mini_batches": num_mini_batches, "num_learning_epochs": 1, "execution": "eager"}
    runner = make_runner(PointRobot(num_envs), algorithm=counted)
    sizes, learn_step = [], runner.alg.learn_step
    runner.alg.learn_step = lambda index: (sizes.append(len(index)), learn_step(index))[1]
    runner.learn(1)
    assert sum(sizes) == 4 * num_envs
    assert len(sizes) == num_mini_batches
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("policy", "count", "message"),
    [
        ({}, 9, r"num_mini_batches=9 does not fit 8 steps"),
        ({"class_name": "ActorCriticRecurrent"}, 3, r"num_mini_batches=3 does not fit 2 environments"),
    ],
)
def test_more_minibatches_than_there_is_to_share_out_are_refused(make_runner, policy, count, message):
    runner = make_runner(PointRobot(2), policy=policy, algorithm={"num_mini_batches": count})
    with pytest.raises(ValueError, match=message):
        runner.learn(1)


@pytest.mark.parametrize("policy", [{}, {"class_name": "ActorCriticRecurrent", "rnn_hidden_size": 6}])
def test_episodes_of_one_step_train(make_runner, rsl_env, policy):
    def terminal(number, answer):
        answer["extras"] = {"terminated": answer["done"]}

    runner = make_runner(rsl_env(length=1, spoil=terminal), policy=policy, algorithm={"num_mini_batches": 1})
    rows = []
    runner.add_callback(
        "pre_update", lambda r: rows.append((r.alg.rollout.returns.clone(), r.alg.rollout.rewards.clone()))
    )
    history = runner.learn(2).history
    returns, rewards = rows[0]
    torch.testing.assert_close(returns, rewards)  # the advantage is r - V: nothing follows
    assert history[0]["episode/mean_length"] == 1
    assert all(np.isfinite(value) for value in history[1].values())
    if policy:
        assert not runner.policy.memory_a.state.any()
        assert not runner.alg.rollout.data["hidden.memory_a"].any()


def test_episodes_that_never_end_are_logged_without_their_statistics(make_runner, rsl_env, tmp_path):
    runner = make_runner(rsl_env(length=10**9), tmp_path)
    history = runner.learn(5).history
    assert not [name for row in history for name in row if name.startswith("episode/")]
    assert history[4]["rollout/mean_reward"] == 150 + 18.5  # steps 17 to 20


def test_all_environments_may_be_cut_off_at_once(make_runner):
    runner = make_runner(PointRobot(4, max_episode_length=4))
    runner.learn(3)
    assert runner.stats.tracker.num_episodes == 12


# ------------------------------------------------------------------ action spaces
@pytest.mark.parametrize(
    ("space", "error"),
    [
        (spaces.Box(np.array([1.0], np.float32), np.array([2.0], np.float32)), None),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)]), TypeError),
        (spaces.Text(3), TypeError),
    ],
)
def test_actions_that_nobody_can_give_are_refused_at_construction(make_runner, space, error):
    class Odd(gymnasium.Env):
        observation_space = spaces.Box(-1, 1, (2,))
        action_space = space

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}

        def step(self, action):
            assert 1.0 <= action[0] <= 2.0
            return np.zeros(2, np.float32), 0.0, False, False, {}

    if error is None:
        make_runner(Odd(), algorithm={"num_mini_batches": 1}).learn(1)
        return
    with pytest.raises(error, match="Box|discrete"):
        make_runner(Odd())


def test_a_policy_of_another_action_width_is_refused(make_runner):
    with pytest.raises((ValueError, RuntimeError), match=r"actions|shape"):
        make_runner(CartPole(2), policy={"num_actions": 5, "action_space": spaces.Box(-1, 1, (5,))}).learn(1)


def test_an_unknown_environment_is_an_error_that_lists_the_known_kinds(make_runner):
    with pytest.raises(TypeError, match=r"(?s)no environment that canter knows.*gymnasium\.Env"):
        make_runner(42)


@pytest.mark.parametrize("huge", [1.0, 1e30])
def test_constant_huge_and_tiny_features_are_normalised_to_finite_numbers(huge):
    normalizer = EmpiricalNormalization(3)
    for step in range(50):
        normalizer.update(torch.tensor([[7.0, huge * (-1) ** step, 1e-42]] * 3))
    out = normalizer(torch.tensor([[7.0, -huge, 1e-42], [8.0, 3e38, 0.0]]))
    assert out.isfinite().all()
    assert normalizer.mean.isfinite().all()
    if huge == 1.0:
        assert out[0, 0] == pytest.approx(0.0, abs=1e-5)  # a constant feature
