"""DQN: targets worked out by hand, target networks, exploration, priorities, and learning a chain of states."""

import pytest
import torch
from gymnasium import spaces

from canter.algorithms import DQN, DQNConfig
from canter.envs.torch_envs import CartPole, PointRobot
from canter.envs.torch_envs.base import TorchEnv
from canter.modules.q_networks import DiscreteQNetwork
from canter.storage.replay import PrioritizedReplayBuffer, ReplayBatch

SMALL = {"network_hidden_dims": (8,), "batch_size": 8, "learning_starts": 8, "buffer_size": 200, "device": "cpu"}


class Table(DiscreteQNetwork):
    """A user's own network: one row of values per state, the state being the observation's first number."""

    def __init__(self, obs_space, action_space, cfg=None):
        super().__init__(obs_space, action_space, cfg)
        self.table = torch.nn.Parameter(torch.zeros(4, self.num_actions))

    def forward(self, obs):
        return self.table[obs[:, 0].long()]


def make(env=None, **given):
    torch.manual_seed(0)
    extra = {name: given.pop(name) for name in ("q_network_class", "q_network_cfg") if name in given}
    return DQN(env or CartPole(2, seed=0), DQNConfig(**{**SMALL, "seed": 1, **given}), **extra)


def batch(obs=0.0, action=0, reward=1.0, after=1.0, done=0.0, discount=0.9):
    one = torch.full((1, 4), obs)
    two = torch.full((1, 4), after)
    numbers = (torch.tensor([float(x)]) for x in (reward, done, discount))
    rewards, dones, discounts = numbers
    return ReplayBatch(one, one, torch.tensor([action]), rewards, two, two, dones, discounts)


@pytest.mark.parametrize(
    ("double", "done", "want"), [(True, 0.0, 1 + 0.9 * 2.0), (False, 0.0, 1 + 0.9 * 7.0), (True, 1.0, 1.0)]
)
def test_the_double_target_uses_the_action_that_the_trained_network_prefers(double, done, want):
    alg = make(q_network_class=Table, double_dqn=double)
    with torch.no_grad():
        alg.q_network.table[1] = torch.tensor([3.0, 1.0])  # prefers action 0
        alg.target.module.table[1] = torch.tensor([2.0, 7.0])  # values it at 2, the other action at 7
    assert alg.q_loss(batch(done=done))[1]["td_target_mean"].item() == pytest.approx(want)


@pytest.mark.parametrize(("action", "want"), [(0, 1 + 0.9 * 2.0 - 0.5 * (4.0 - 1.0)), (1, 1 + 0.9 * 2.0)])
def test_the_action_gap_lowers_targets_by_a_part_of_the_disadvantage(action, want):
    alg = make(q_network_class=Table, action_gap_coef=0.5)
    with torch.no_grad():
        alg.q_network.table[0] = torch.tensor([9.0, 0.0])  # not read: the gap is the target network's
        alg.target.module.table[0] = torch.tensor([1.0, 4.0])
        alg.target.module.table[1] = torch.tensor([2.0, 2.0])
    assert alg.q_loss(batch(action=action))[1]["td_target_mean"].item() == pytest.approx(want)


def test_an_action_gap_tells_apart_actions_that_lose_one_step():
    """Action 1 ends in state 1 with a reward of 1, action 0 stays in state 0: their values differ by 1 - gamma."""
    gaps = []
    for coef in (0.0, 0.9):
        alg = make(q_network_class=Table, action_gap_coef=coef, double_dqn=False)
        table = alg.target.module.table
        for _ in range(400):
            stay = alg.q_loss(batch(action=0, reward=0.0, after=0.0, discount=0.99))[1]["td_target_mean"]
            end = alg.q_loss(batch(action=1, reward=1.0, done=1.0))[1]["td_target_mean"]
            with torch.no_grad():
                table[0] = torch.stack([stay, end])
        gaps.append((table[0, 1] - table[0, 0]).item())
    assert gaps == pytest.approx([0.01, 0.01 / (1 - 0.9)], abs=1e-4)


def test_hard_and_soft_target_updates():
    hard = make(target_update_interval=3)
    run(hard, 10)
    before = [p.clone() for p in hard.target.module.parameters()]
    hard.train(2)
    assert all(torch.equal(a, b) for a, b in zip(before, hard.target.module.parameters(), strict=True))
    hard.train(1)
    online = list(hard.q_network.parameters())
    assert all(torch.equal(a, b) for a, b in zip(online, hard.target.module.parameters(), strict=True))
    soft = make(tau=0.25, target_update_interval=1)
    run(soft, 10)
    before = [p.clone() for p in soft.target.module.parameters()]
    soft.train(1)
    for was, own, now in zip(before, soft.q_network.parameters(), soft.target.module.parameters(), strict=True):
        assert torch.allclose(now, was + 0.25 * (own - was), atol=1e-7)
        assert not torch.equal(now, was)


def test_many_gradient_steps_at_once_stop_at_every_target_update():
    alg = make(target_update_interval=3)
    run(alg, 10)
    moments = []
    alg.update_targets = lambda: moments.append(alg.num_updates)
    alg.train(7)
    alg.train(3)
    assert moments == [3, 6, 9]


def run(alg, steps):
    obs, critic = alg.env.get_observations()
    for _ in range(steps):
        record = alg.env.step(alg.explore(obs, critic))
        alg.process_step(record)
        obs, critic = record.obs, record.critic_obs


def test_epsilon_falls_linearly_and_is_applied_per_environment():
    alg = make(CartPole(3000, seed=0), epsilon_start=1.0, epsilon_end=0.2, epsilon_decay_steps=100, buffer_size=9000)
    assert [alg.get_epsilon(t) for t in (0, 50, 100, 10_000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    obs, _ = alg.env.get_observations()
    greedy = alg.act(obs, deterministic=True)
    assert torch.equal(greedy, alg.q_network(obs).argmax(1))
    share = (alg.act(obs, epsilon=0.5) != greedy).float().mean()
    assert share == pytest.approx(0.25, abs=0.03)
    alg.timesteps = 10_000
    alg.before_exploring()
    assert (alg.explore_step(obs) != greedy).float().mean() == pytest.approx(0.1, abs=0.03)
    assert alg.random_actions().unique().tolist() == [0, 1]


def test_environments_share_out_epsilon_from_wild_to_careful():
    alg = make(CartPole(3, seed=0), epsilon_start=0.5, epsilon_end=0.25, epsilon_decay_steps=30, epsilon_spread=2.0)
    alg.before_exploring()
    torch.testing.assert_close(alg.epsilon, torch.tensor([0.5, 0.25, 0.125]))  # to the power of 1, 2 and 3
    alg.timesteps = 30
    alg.before_exploring()
    torch.testing.assert_close(alg.epsilon, torch.tensor([0.25, 0.0625, 0.015625]))
    alone = make(CartPole(1, seed=0), epsilon_start=0.5, epsilon_end=0.5, epsilon_spread=2.0)
    alone.before_exploring()
    assert alone.epsilon.tolist() == [0.5]


def test_a_repeated_action_ends_with_its_episode():
    alg = make(
        CartPole(2, seed=0, max_episode_length=3),
        epsilon_start=0.0,
        epsilon_end=0.0,
        learning_starts=0,
        epsilon_repeats=64,
    )
    alg.repeated.set_state(torch.tensor([[1, 0], [50, 50]]))
    run(alg, 2)
    assert alg.repeated.left.tolist() == [48, 48]
    run(alg, 1)
    assert alg.repeated.left.tolist() == [0, 0]


def test_an_update_needs_enough_steps_and_reports_the_documented_metrics():
    alg = make()
    assert alg.update() == {}
    run(alg, 10)
    metrics = alg.update()
    assert {"train/q_loss", "train/mean_q", "train/td_target_mean", "train/grad_norm"} <= set(metrics)
    assert metrics["train/learning_rate"] == pytest.approx(1e-3, rel=1e-4)
    assert set(alg.exploration()) == {"exploration/epsilon"}


def test_n_step_returns_reach_the_loss():
    alg = make(n_step=3, gamma=0.5, learning_starts=8)
    run(alg, 30)
    drawn = next(alg.batches(1))
    assert set(drawn.discounts.tolist()) <= {0.5, 0.25, 0.125}
    assert 0.125 in drawn.discounts.tolist()
    assert torch.allclose(drawn.rewards, (1 - drawn.discounts) / 0.5)  # CartPole pays 1 in every step


def test_box_actions_are_refused():
    with pytest.raises(ValueError, match="DQN needs Discrete actions, got Box"):
        DQN(PointRobot(2), DQNConfig(device="cpu"))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="epsilon_end must be a number from 0 to 1, got 2"):
        make(epsilon_end=2.0)
    with pytest.raises(ValueError, match="batch_size=300 is more than the replay buffer holds: 200"):
        make(batch_size=300).prepare()
    with pytest.raises(TypeError, match="'epsilon_end'"):
        DQNConfig(epsilon_begin=1.0)
    with pytest.raises(ValueError, match="DQN needs an environment"):
        DQN(None, DQNConfig())


# ---------------------------------------------------------------------- priorities
def test_prioritised_steps_are_sampled_in_proportion_with_importance_weights():
    buffer = PrioritizedReplayBuffer(10, (1,), exponent=1.0)
    for i in range(4):
        obs = torch.tensor([[float(i)]])
        buffer.add(obs, torch.tensor([0]), torch.tensor([float(i)]), obs + 1, torch.tensor([0]))
    buffer.set_priorities(torch.arange(4), torch.tensor([1.0, -2.0, 3.0, 4.0]))
    buffer.correction.fill_(1.0)
    drawn = buffer.draw(40_000, 1, 0.9, torch.Generator().manual_seed(0))
    share = drawn.rewards.long().bincount(minlength=4) / 40_000
    assert torch.allclose(share, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.005)
    for i, weight in enumerate((1.0, 1 / 2, 1 / 3, 1 / 4)):
        assert drawn.weights[drawn.rewards == i].mean() == pytest.approx(weight, rel=1e-3)
    buffer.add(torch.tensor([[4.0]]), torch.tensor([0]), torch.tensor([4.0]), torch.tensor([[5.0]]), torch.tensor([0]))
    assert buffer.data["priorities"][4] == 4.0 + 1e-6, "new steps get the highest priority"
    buffer.set_priorities(torch.arange(5), torch.full((5,), 0.5))
    buffer.add(torch.tensor([[5.0]]), torch.tensor([0]), torch.tensor([5.0]), torch.tensor([[6.0]]), torch.tensor([0]))
    assert buffer.data["priorities"][5] == 4.0 + 1e-6, "the highest so far"


def test_another_exponent_of_priorities_takes_effect_at_once():
    alg = make(prioritized_replay=True)
    run(alg, 20)
    alg.train(2)
    alg.priority_exponent = 0.0
    alg.train(1)
    powers = alg.replay.tree.levels[0]
    assert set(powers[alg.replay.data["holds_step"].nonzero().squeeze(-1)].tolist()) == {1.0}


def test_the_loss_of_a_sample_is_weighted_by_its_importance():
    alg = make(q_network_class=Table)  # every value is 0, so the errors are the rewards of final steps
    pairs = zip(batch(reward=1.0, done=1.0)[:-3], batch(reward=3.0, done=1.0)[:-3], strict=True)
    both = ReplayBatch(*(torch.cat(pair) for pair in pairs))
    assert alg.q_loss(both)[0].item() == pytest.approx((0.5 + 2.5) / 2)
    weighted = both._replace(weights=torch.tensor([1.0, 0.2]))
    assert alg.q_loss(weighted)[0].item() == pytest.approx((0.5 + 0.2 * 2.5) / 2)


def test_learning_sets_the_priorities_of_the_sampled_steps():
    alg = make(prioritized_replay=True, importance_exponent=0.4)
    run(alg, 20)
    before = alg.replay.data["priorities"].clone()
    alg.train(2)
    assert not torch.equal(before, alg.replay.data["priorities"])
    alg.adjust_learning_rate(0.5)
    alg.train(1)
    assert float(alg.replay.correction) == pytest.approx(0.7)


# ---------------------------------------------------------------------- a task
class Chain(TorchEnv):
    """Five states in a row; moving right four times pays 1, moving left ends at once with 0.1."""

    def __init__(self, num_envs, seed=0):
        self.obs_space = self.critic_obs_space = spaces.Box(0, 1, (5,))
        self.action_space = spaces.Discrete(2)
        super().__init__(num_envs, "cpu", seed, 20)

    def initial_state(self, n):
        return {"place": torch.zeros(n, dtype=torch.long)}

    def dynamics(self, state, action):
        place = state["place"] + action
        is_left, is_there = action == 0, place >= 4
        reward = torch.where(is_there, 1.0, torch.where(is_left, 0.1, 0.0))
        return {"place": place.clamp(max=4)}, reward, is_left | is_there

    def observe(self, state):
        return torch.nn.functional.one_hot(state["place"], 5).float()


@pytest.mark.parametrize("more", [{}, {"dueling": True, "n_step": 3}, {"prioritized_replay": True}])
def test_dqn_learns_to_walk_a_chain_to_its_end(more):
    alg = make(Chain(8), learning_rate=5e-3, gamma=0.9, target_update_interval=20, epsilon_decay_steps=1000, **more)
    obs, critic = alg.env.get_observations()
    for _ in range(200):
        record = alg.env.step(alg.explore(obs, critic))
        alg.process_step(record)
        if alg.can_learn:
            alg.train(1)
        obs, critic = record.obs, record.critic_obs
    states = torch.eye(5)[:4]
    assert alg.act(states, deterministic=True).tolist() == [1, 1, 1, 1]
    best = alg.q_network(states).amax(1)
    assert torch.allclose(best, torch.tensor([0.9**3, 0.9**2, 0.9, 1.0]), atol=0.15)
