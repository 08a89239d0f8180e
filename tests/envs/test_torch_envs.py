import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from no_host_sync import NoHostSync

from canter.envs.records import step_record
from canter.envs.torch_envs import TORCH_ENVS, CartPole, ImageReach, MaskedCartPole, Pendulum, PointRobot, TorchEnv
from canter.utils.tree import tree_leaves

EVERY = pytest.mark.parametrize("name", sorted(TORCH_ENVS))


def actions_of(env, seed=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        if isinstance(env.action_space, spaces.Discrete):
            yield torch.randint(env.num_actions, (env.num_envs,), generator=generator)
        else:
            # Wider than the bounds, so that clipping is exercised.
            yield 3 * torch.randn(env.num_envs, env.num_actions, generator=generator)


def set_state(env, name, values):
    state = env.get_state()
    state["state"][name] = torch.as_tensor(values, dtype=torch.float32)
    env.set_state(state)


def test_cartpole_moves_as_gymnasiums_does():
    env, other = CartPole(5, seed=1), gymnasium.make("CartPole-v1").unwrapped
    rng = np.random.default_rng(0)
    other.reset(seed=0)
    ends = 0
    for _ in range(400):
        start = rng.uniform(-1, 1, (5, 4)) * [3.0, 3, 0.3, 3]
        action = rng.integers(2, size=5)
        set_state(env, "pole", start)
        record = env.step(torch.as_tensor(action))
        for i in range(5):
            other.state, other.steps_beyond_terminated = start[i].astype(np.float32), None
            obs, reward, terminated, _, _ = other.step(int(action[i]))
            np.testing.assert_allclose(record.final_obs[i], obs, rtol=1e-5, atol=1e-5)
            assert record.reward[i] == reward == 1.0
            assert record.terminated[i] == terminated
            ends += terminated
    assert 200 < ends < 1900


def test_cartpole_follows_gymnasium_through_an_episode():
    env, other = CartPole(1, seed=3), gymnasium.make("CartPole-v1")
    obs, _ = env.reset()
    other.reset(seed=0)
    for t in range(500):
        # From the same state every step: an unstable system would enlarge the rounding of float32.
        other.unwrapped.state = obs[0].numpy().astype(np.float64)
        action = int(obs[0, 2] + 0.5 * obs[0, 3] > 0)
        record = env.step(torch.tensor([action]))
        expected, _, terminated, truncated, _ = other.step(action)
        np.testing.assert_allclose(record.final_obs[0], expected, rtol=1e-5, atol=1e-6)
        assert (bool(record.terminated), bool(record.truncated)) == (terminated, truncated), t
        obs = record.obs
    assert truncated


def test_pendulum_moves_as_gymnasiums_does():
    env, other = Pendulum(5, seed=1), gymnasium.make("Pendulum-v1").unwrapped
    rng = np.random.default_rng(0)
    other.reset(seed=0)
    for _ in range(300):
        start = rng.uniform(-1, 1, (5, 2)) * [9.0, 8.0]
        torque = rng.uniform(-4, 4, (5, 1)).astype(np.float32)
        set_state(env, "rod", start)
        record = env.step(torch.as_tensor(torque))
        for i in range(5):
            other.state = start[i].astype(np.float32).astype(np.float64)
            obs, reward, _, _, _ = other.step(torque[i])
            np.testing.assert_allclose(record.obs[i], obs, rtol=1e-4, atol=2e-5)
            assert float(record.reward[i]) == pytest.approx(reward, rel=1e-4, abs=1e-4)
        assert not record.done.any()
        env.episode_length_buf = torch.zeros(5)


@pytest.mark.parametrize(("cls", "limit"), [(CartPole, 500), (MaskedCartPole, 500), (Pendulum, 200)])
def test_time_limits_are_gymnasiums(cls, limit):
    env = cls(2, seed=0)
    assert env.max_episode_length == limit
    env.reset()
    env.episode_length_buf = torch.tensor([limit - 2, 0])
    if cls is not Pendulum:
        set_state(env, "pole", torch.zeros(2, 4))
    action = next(actions_of(env))
    assert not env.step(action).done.any()
    record = env.step(action)
    assert record.truncated.tolist() == [True, False]
    assert not record.terminated.any()
    assert env.episode_length_buf.tolist() == [0, 2]


def test_initial_states_have_gymnasiums_ranges():
    poles = CartPole(20000, seed=0).get_observations()[0]
    assert 0.0499 < poles.max() <= 0.05
    assert -0.05 <= poles.min() < -0.0499
    rods = Pendulum(20000, seed=0).get_state()["state"]["rod"]
    assert rods[:, 0].abs().max().item() == pytest.approx(np.pi, abs=1e-3)
    assert rods[:, 1].abs().max().item() == pytest.approx(1.0, abs=1e-3)


def test_masked_cartpole_hides_the_velocities():
    env, plain = MaskedCartPole(4, seed=2), CartPole(4, seed=2)
    assert env.num_obs == 2
    assert torch.equal(env.reset()[0], plain.reset()[0][:, [0, 2]])
    assert env.step(torch.ones(4)).obs.shape == (4, 2)


@EVERY
def test_records_have_the_promised_shapes(name):
    env = TORCH_ENVS[name](6, seed=0, max_episode_length=20)
    env.reset()
    actions = actions_of(env)
    num_ends = 0
    for _ in range(50):
        record = env.step(next(actions))
        for part, space in ((record.obs, env.obs_space), (record.critic_obs, env.critic_obs_space)):
            assert part.shape == (6, *space.shape)
            assert str(part.dtype) == f"torch.{space.dtype}"
        assert record.final_obs.shape == record.obs.shape
        assert (record.critic_obs is record.obs) == (record.final_critic_obs is record.final_obs)
        assert record.reward.dtype == torch.float32
        assert record.reward.shape == record.valid.shape == (6,)
        assert not (record.terminated & record.truncated).any()
        assert torch.isfinite(record.reward).all()
        num_ends += int(record.done.sum())
    assert num_ends >= 12


@EVERY
def test_the_final_observation_is_the_one_before_the_reset(name):
    env = TORCH_ENVS[name](3, seed=0, max_episode_length=1)
    twin = TORCH_ENVS[name](3, seed=0, max_episode_length=9)
    action = next(actions_of(env))
    record, other = env.step(action), twin.step(action)
    assert record.truncated.all()
    assert torch.equal(record.final_obs, other.obs)
    assert torch.equal(record.final_critic_obs, other.critic_obs)
    assert not torch.equal(record.obs, record.final_obs)
    assert torch.equal(env.get_observations()[0], record.obs)


@EVERY
def test_no_step_waits_for_the_host(name):
    env = TORCH_ENVS[name](4, seed=0, max_episode_length=3)
    action = next(actions_of(env))
    with NoHostSync():
        env.reset()
        for _ in range(5):
            env.step(action)
        env.get_observations()


@EVERY
def test_earlier_records_are_never_overwritten(name):
    env = TORCH_ENVS[name](4, seed=0, max_episode_length=5)
    actions = actions_of(env)
    kept = [("reset", env.reset())]
    kept += [("step", env.step(next(actions))[:8]) for _ in range(4)]
    copies = [[leaf.clone() for part in parts for _, leaf in tree_leaves(part)] for _, parts in kept]
    for _ in range(12):
        env.step(next(actions))
    for (_, parts), saved in zip(kept, copies, strict=True):
        leaves = [leaf for part in parts for _, leaf in tree_leaves(part)]
        assert all(torch.equal(a, b) for a, b in zip(leaves, saved, strict=True))


@EVERY
def test_state_continues_exactly(name):
    env = TORCH_ENVS[name](4, seed=0, max_episode_length=7)
    actions = actions_of(env)
    for _ in range(10):
        env.step(next(actions))
    state = env.get_state()
    following = [next(actions) for _ in range(20)]
    first = [env.step(a) for a in following]
    other = TORCH_ENVS[name](4, seed=99, max_episode_length=7)
    other.set_state(state)
    for a, record in zip(following, first, strict=True):
        again = other.step(a)
        assert torch.equal(again.obs, record.obs)
        assert torch.equal(again.critic_obs, record.critic_obs)
        assert torch.equal(again.reward, record.reward)
        assert torch.equal(again.done, record.done)
    assert any(r.done.any() for r in first)


@EVERY
def test_a_seed_determines_every_observation(name):
    def run(env):
        env.reset()
        actions = actions_of(env)
        return torch.stack([env.step(next(actions)).obs.float() for _ in range(15)])

    make = TORCH_ENVS[name]
    first = run(make(3, seed=5, max_episode_length=6))
    assert torch.equal(first, run(make(3, seed=5, max_episode_length=6)))
    assert not torch.equal(first, run(make(3, seed=6, max_episode_length=6)))
    env = make(3, seed=1, max_episode_length=6)
    env.seed(8)
    second = run(env)
    env.seed(8)
    assert torch.equal(second, run(env))
    assert not torch.equal(run(make(3)), run(make(3)))


@EVERY
def test_global_random_numbers_are_left_alone(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    env = TORCH_ENVS[name](3)
    env.step(next(actions_of(env)))
    assert torch.equal(before, torch.get_rng_state())


@EVERY
def test_images_are_rendered(name):
    env = TORCH_ENVS[name](2, seed=0)
    first = env.render()
    assert first.dtype == np.uint8
    assert first.ndim == 3
    assert first.shape[2] == 3
    for action, _ in zip(actions_of(env), range(6), strict=False):
        env.step(action)
    assert (env.render() != first).any()


@EVERY
def test_extras_make_the_same_record_again(name):
    env = TORCH_ENVS[name](3, seed=0, max_episode_length=2)
    for action, _ in zip(actions_of(env), range(4), strict=False):
        record = env.step(action)
        again = step_record(record.obs, record.critic_obs, record.reward, record.done, record.extras)
        assert torch.equal(again.truncated, record.truncated)
        assert torch.equal(again.final_obs, record.final_obs)
        assert torch.equal(again.final_critic_obs, record.final_critic_obs)


def test_actions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"actions have shape \(4, 3\); PointRobot wants \(4, 2\)"):
        PointRobot(4).step(torch.zeros(4, 3))
    assert torch.equal(CartPole(2, seed=0).step(torch.ones(2, 1)).obs, CartPole(2, seed=0).step(torch.ones(2)).obs)


def test_an_observation_that_shares_memory_with_the_state_is_an_error():
    class Leaky(CartPole):
        def observe(self, state):
            return state["pole"]

    with pytest.raises(TypeError, match="Leaky.observe returns its state 'pole' itself"):
        Leaky(2)


def test_image_reach_shows_where_things_are():
    env = ImageReach(1, seed=0)
    set_state(env, "dot", [[-0.9, 0.9]])
    set_state(env, "target", [[0.9, 0.9]])
    image = env.get_observations()[0][0]
    assert image.shape == (3, 24, 24)
    peaks = [divmod(int(image[c].flatten().int().argmax()), 24) for c in (0, 1)]
    assert peaks == [(22, 1), (22, 22)]
    assert image[2].max() == 0
    record = env.step(torch.tensor([[9.0, 0.0]]))
    assert record.reward.item() == pytest.approx(-1.6)
    assert divmod(int(record.obs[0, 0].flatten().int().argmax()), 24)[1] > 1
    for _ in range(9):
        record = env.step(torch.tensor([[1.0, 0.0]]))
    assert record.reward.item() == pytest.approx(0.0, abs=1e-5)


def still_robot(**state):
    env = PointRobot(1, seed=0)
    env.noise, env.command_change_prob = 0.0, 0.0
    for name, value in {"command": [[0.5, 0.0]], "friction": [[1.0]], **state}.items():
        set_state(env, name, value)
    return env


def test_point_robot_obeys_newton():
    env = still_robot(velocity=[[1.0, 0.0]])
    record = env.step(torch.tensor([[0.5, -9.0]]))
    # v + dt (F - c v) / m = 1 + 0.05 (4 - 1) / 2; the other force is clipped to 8.
    assert record.critic_obs[0].tolist() == pytest.approx([1.075, -0.2, 0.5, 0.0, 0.5, -1.0, 1.075, -0.2, 1.0])
    assert record.obs[0].tolist() == pytest.approx([1.075, -0.2, 0.5, 0.0, 0.5, -1.0])
    error = 0.575**2 + 0.2**2
    assert record.reward.item() == pytest.approx(np.exp(-4 * error) - 0.01 * (0.25 + 1.0), rel=1e-5)


def test_point_robot_reports_its_metrics():
    env = still_robot(velocity=[[1.0, 0.0]])
    env.step(torch.tensor([[0.5, -1.0]]))
    assert env.tracking_error.tolist() == pytest.approx([0.575])
    speed = np.hypot(1.075, 0.2)
    assert env.CoT.tolist() == pytest.approx([(4 * 1.075 + 8 * 0.2) / (2.0 * 9.8 * speed)], rel=1e-5)
    assert env.tracking_error.shape == env.CoT.shape == (1,)


def test_point_robot_at_rest_costs_nothing():
    env = still_robot()
    env.step(torch.zeros(1, 2))
    assert env.CoT.tolist() == [0.0]


def test_point_robot_metrics_are_those_before_a_reset():
    env = still_robot(velocity=[[1.0, 0.0]])
    env.max_episode_length = 1
    record = env.step(torch.tensor([[0.5, -1.0]]))
    assert record.truncated.all()
    assert env.tracking_error.tolist() == pytest.approx([0.575])
    assert record.critic_obs[0, 6:8].tolist() == [0.0, 0.0]


def test_point_robot_falls_when_too_fast():
    env = still_robot(velocity=[[3.2, 0.0]])
    assert env.step(torch.zeros(1, 2)).terminated.tolist() == [True]


def test_point_robot_segments_fill_its_observations():
    env = PointRobot(1)
    assert sum(shape[0] for shape in env.obs_segments.values()) == env.num_obs == 6
    assert sum(shape[0] for shape in env.critic_obs_segments.values()) == env.num_privileged_obs == 9


def test_point_robot_commands_change_now_and_then():
    env = PointRobot(2000, seed=0, max_episode_length=1000)
    before = env.get_observations()[0][:, 2:4].clone()
    after = env.step(torch.zeros(2000, 2)).obs[:, 2:4]
    changed = (before != after).any(1).float().mean()
    assert 0.01 < changed < 0.03


def test_a_new_environment_is_three_short_methods():
    class Walk(TorchEnv):
        def __init__(self, num_envs):
            self.obs_space = self.critic_obs_space = spaces.Box(-np.inf, np.inf, (1,))
            self.action_space = spaces.Box(-1.0, 1.0, (1,))
            super().__init__(num_envs, seed=0, max_episode_length=4)

        def initial_state(self, n):
            return {"x": torch.zeros(n, 1)}

        def dynamics(self, state, action):
            x = state["x"] + action
            return {"x": x}, x[:, 0], x[:, 0] > 2.5

        def observe(self, state):
            return {"position": state["x"].clone()}

    env = Walk(2)
    env.reset()
    records = [env.step(torch.tensor([[1.0], [0.5]])) for _ in range(4)]
    assert [r.terminated.tolist() for r in records] == [[False, False], [False, False], [True, False], [False, False]]
    assert records[2].final_obs["position"].tolist() == [[3.0], [1.5]]
    assert records[2].obs["position"].tolist() == [[0.0], [1.5]]
    assert records[3].truncated.tolist() == [False, True]
    assert records[3].obs["position"].tolist() == [[1.0], [0.0]]
