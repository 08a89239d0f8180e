"""Networks that score actions, one by one and stacked."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.modules.q_networks import (
    CNNContinuousQNetwork,
    CNNQNetwork,
    ContinuousQNetwork,
    DiscreteQNetwork,
    ListedCritics,
    MLPContinuousQNetwork,
    MLPQNetwork,
    RepeatedExploration,
    StackedMLPCritics,
    UnitActions,
    build_critics,
    explore_rows,
)

OBS, ACTIONS = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (2,))
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)


def test_dueling_values_are_a_level_and_centred_advantages():
    torch.manual_seed(0)
    net = MLPQNetwork(OBS, spaces.Discrete(4), {"hidden_dims": [8, 6], "dueling": True})
    obs = torch.randn(5, 3)
    features = torch.relu(net.encoder(obs))
    out = net.heads.out(features)
    level, advantage = out[:, :1], out[:, 1:]
    assert torch.allclose(net(obs), level + advantage - advantage.mean(1, keepdim=True), atol=1e-6)
    assert torch.allclose(net(obs).mean(1), level[:, 0], atol=1e-6)
    plain = MLPQNetwork(OBS, spaces.Discrete(4), {"hidden_dims": [8, 6]})
    assert plain(obs).shape == (5, 4)
    assert plain.heads.out.out_features == 4


@pytest.mark.parametrize("cls", [MLPQNetwork, CNNQNetwork, DiscreteQNetwork])
def test_values_of_a_box_are_refused(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__} needs Discrete actions, got Box"):
        cls(IMAGE if cls is CNNQNetwork else OBS, ACTIONS)


@pytest.mark.parametrize("dueling", [False, True])
def test_images_have_values_too(dueling):
    cfg = {"hidden_dims": [16], "dueling": dueling}
    net = CNNQNetwork(IMAGE, spaces.Discrete(3), cfg)
    assert net(torch.randint(0, 255, (2, 3, 36, 36), dtype=torch.uint8)).shape == (2, 3)
    critic = CNNContinuousQNetwork(IMAGE, ACTIONS, {"hidden_dims": [16], "num_atoms": 5})
    image = torch.randint(0, 255, (2, 3, 36, 36), dtype=torch.uint8)
    assert critic(image, torch.zeros(2, 2)).shape == (2, 5)
    assert not torch.equal(critic(image, torch.zeros(2, 2)), critic(image, torch.ones(2, 2)))


def test_exploration_is_drawn_for_each_row():
    values = torch.tensor([[0.0, 5.0, 1.0, 2.0]]).expand(40_000, 4)
    draw = torch.Generator().manual_seed(0)
    assert (explore_rows(values, 0.0, draw) == 1).all()
    anything = explore_rows(values, 1.0, draw).bincount(minlength=4) / 40_000
    assert torch.allclose(anything, torch.full((4,), 0.25), atol=0.01)
    half = explore_rows(values, 0.5, draw)
    assert (half == 1).float().mean() == pytest.approx(0.5 + 0.5 / 4, abs=0.01)
    pairs = (half.view(-1, 2) != 1).float()  # neighbours are independent
    assert pairs.prod(1).mean() == pytest.approx(0.375**2, abs=0.01)


def test_random_actions_last_n_steps_with_a_probability_of_one_over_n_squared():
    repeated = RepeatedExploration(60_000, 3, torch.device("cpu"))
    repeated.explore(torch.zeros(60_000, 2), torch.ones(60_000), torch.Generator().manual_seed(0))
    lengths = (repeated.left + 1).bincount(minlength=4) / 60_000
    assert torch.allclose(lengths, torch.tensor([0, 36, 9, 4]) / 49, atol=0.01)  # 1, 1/4 and 1/9, their sum is 49/36


def test_a_random_action_is_repeated_until_its_time_or_its_episode_is_over():
    repeated, draw = RepeatedExploration(3, 8, torch.device("cpu")), torch.Generator().manual_seed(0)
    best, never = torch.tensor([[0.0, 5.0, 1.0]]).expand(3, 3), torch.zeros(3)
    assert repeated.explore(best, never, draw).tolist() == [1, 1, 1]
    repeated.set_state(torch.tensor([[0, 2, 2], [2, 1, 8]]))
    assert repeated.explore(best, torch.ones(3), draw).tolist() == [0, 2, 2]  # none begins while one lasts
    repeated.end_episodes(torch.tensor([False, False, True]))
    assert repeated.explore(best, never, draw).tolist() == [0, 1, 1]
    assert repeated.explore(best, never, draw).tolist() == [1, 1, 1]
    assert repeated.state()[1].tolist() == [0, 0, 0]


def test_the_network_acts_greedily_or_at_random():
    net = MLPQNetwork(OBS, spaces.Discrete(3), {"hidden_dims": [4]})
    obs = torch.randn(500, 3)
    assert torch.equal(net.act(obs), net(obs).argmax(1))
    assert not torch.equal(net.act(obs, epsilon=1.0), net(obs).argmax(1))


def test_actions_are_seen_in_units_of_half_their_range():
    unit = UnitActions(spaces.Box(np.array([-2.0, 0.0, -np.inf]), np.array([2.0, 8.0, np.inf]), dtype=np.float64))
    assert unit(torch.tensor([[2.0, 8.0, 7.0], [-2.0, 0.0, 0.0], [0.0, 4.0, 1.0]])).tolist() == [
        [1.0, 1.0, 7.0],
        [-1.0, -1.0, 0.0],
        [0.0, 0.0, 1.0],
    ]
    actions = torch.rand(2, 2)
    assert UnitActions(spaces.Box(-1, 1, (2,)))(actions) is actions


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("num_atoms", [1, 7])
def test_stacked_critics_are_the_same_function_as_single_ones(layer_norm, num_atoms):
    torch.manual_seed(0)
    cfg = {"hidden_dims": [8, 6], "layer_norm": layer_norm, "num_atoms": num_atoms}
    stacked = build_critics(MLPContinuousQNetwork, OBS, ACTIONS, cfg)
    assert isinstance(stacked, StackedMLPCritics)
    singles = [MLPContinuousQNetwork(OBS, ACTIONS, cfg) for _ in range(2)]
    with torch.no_grad():
        for p in stacked.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for member, single in enumerate(singles):
            layers = [m for m in single.mlp if isinstance(m, (torch.nn.Linear, torch.nn.LayerNorm))]
            own = [m for m in stacked.mlp if hasattr(m, "weight")]
            for layer, mine in zip(layers, own, strict=True):
                weight = mine.weight[member]
                layer.weight.copy_(weight.T if isinstance(layer, torch.nn.Linear) else weight[0])
                layer.bias.copy_(mine.bias[member, 0])
    obs, actions = torch.randn(5, 3), torch.randn(5, 2)
    want = torch.stack([single(obs, actions) for single in singles])
    assert stacked(obs, actions).shape == ((2, 5) if num_atoms == 1 else (2, 5, 7))
    assert torch.allclose(stacked(obs, actions), want, atol=1e-5)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_critics_one_by_one_give_the_values_and_gradients_of_the_batched_layers(layer_norm):
    torch.manual_seed(0)
    stacked = build_critics(MLPContinuousQNetwork, OBS, ACTIONS, {"hidden_dims": [8, 6], "layer_norm": layer_norm})
    with torch.no_grad():
        for p in stacked.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x, weights = torch.randn(4, 5), torch.randn(2, 4, 1)
    outs = torch.stack(stacked.forward_each(x)), stacked.mlp(x.expand(2, 4, 5))
    assert torch.allclose(*outs, atol=1e-6)
    each, batched = (torch.autograd.grad((out * weights).sum(), list(stacked.parameters())) for out in outs)
    for own, want in zip(each, batched, strict=True):
        assert torch.allclose(own, want, atol=1e-6)


class Sum(ContinuousQNetwork):
    """A user's own critic, with the documented constructor and one method."""

    def __init__(self, obs_space, action_space, cfg=None):
        super().__init__(obs_space, action_space, cfg)
        self.scale = torch.nn.Parameter(torch.rand(()))

    def forward(self, obs, actions):
        return self.scale * (obs.sum(1) + actions.sum(1))


def test_critics_of_a_user_s_class_are_asked_one_by_one():
    critics = build_critics(Sum, OBS, ACTIONS, None)
    assert isinstance(critics, ListedCritics)
    obs, actions = torch.ones(4, 3), torch.ones(4, 2)
    scales = torch.stack([critic.scale for critic in critics.critics])
    assert torch.allclose(critics(obs, actions), scales.unsqueeze(1) * 5.0)
    assert copy.deepcopy(critics)(obs, actions).shape == (2, 4)


def test_a_base_class_raises_with_the_method_to_implement():
    with pytest.raises(NotImplementedError, match=r"implement forward\(obs\)"):
        DiscreteQNetwork(OBS, spaces.Discrete(2))(torch.zeros(1, 3))
    with pytest.raises(NotImplementedError, match=r"implement forward\(obs, actions\)"):
        ContinuousQNetwork(OBS, ACTIONS)(torch.zeros(1, 3), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="needs a Box of them, got Discrete"):
        MLPContinuousQNetwork(OBS, spaces.Discrete(2))


def test_a_critic_of_one_s_own_may_give_its_values_in_a_column():
    class Column(torch.nn.Module):
        def forward(self, obs, actions):
            return (obs.sum(-1) + actions.sum(-1)).unsqueeze(-1)

    obs, actions = torch.arange(6.0).view(3, 2), torch.tensor([[10.0], [20.0], [30.0]])
    assert ListedCritics([Column(), Column()])(obs, actions).tolist() == [[11.0, 25.0, 39.0]] * 2
