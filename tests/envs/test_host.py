import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs.host import ActionCast, batch_to_rows, empty_rows, put_row, spawn_seeds, stored_space


def test_stored_spaces_hold_two_dtypes():
    space = spaces.Dict(
        {
            "wide": spaces.Box(-1, 1, (2,), np.float64),
            "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
            "mode": spaces.Discrete(3),
            "flags": spaces.MultiBinary(4),
        }
    )
    kept = stored_space(space)
    assert {name: (part.shape, part.dtype) for name, part in kept.items()} == {
        "wide": ((2,), np.float32),
        "image": ((3, 8, 8), np.uint8),
        "mode": ((3,), np.float32),
        "flags": ((4,), np.float32),
    }


def test_names_keep_their_order():
    box = spaces.Box(-1, 1, (2,))
    assert list(stored_space(spaces.Dict([("z", box), ("a", box)]))) == ["z", "a"]


def test_discrete_observations_become_one_hot():
    space = spaces.Discrete(3, start=5)
    rows = empty_rows(stored_space(space), 2)
    put_row(rows, 1, np.int64(6), space)
    assert rows.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert batch_to_rows(np.array([5, 7]), space, 2).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_tuple_observations_follow_each_other():
    space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-9, 9, (2,))))
    batch = (np.array([1, 0]), np.array([[3.0, 4.0], [5.0, 6.0]], np.float32))
    assert batch_to_rows(batch, space, 2).tolist() == [[0, 1, 3, 4], [1, 0, 5, 6]]


def test_a_row_of_another_shape_is_refused_by_name():
    space = spaces.Dict({"arm": spaces.Box(-1, 1, (4,))})
    rows = empty_rows(stored_space(space), 2)
    with pytest.raises(ValueError, match=r"observation 'arm' of environment 1 has shape \(1,\), expected \(4,\)"):
        put_row(rows, 1, {"arm": np.zeros(1)}, space)
    with pytest.raises(ValueError, match=r"has \['leg'\], expected \['arm'\]"):
        put_row(rows, 1, {"leg": np.zeros(4)}, space)


def test_a_batch_is_copied():
    batch = np.zeros((2, 3), np.float32)
    rows = batch_to_rows(batch, spaces.Box(-1, 1, (3,)), 2)
    batch[:] = 7
    assert rows.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_actions_are_clipped_and_cast():
    space = spaces.Box(np.array([-1, -np.inf]), np.array([2, 0.5]), dtype=np.float64)
    actions = torch.tensor([[-3.0, -9.0], [5.0, 0.25]])
    out = ActionCast(space, 2)(actions)
    assert out.tolist() == [[-1.0, -9.0], [2.0, 0.25]]
    assert out.dtype == np.float64
    assert ActionCast(space, 2, clip=False)(actions).tolist() == actions.tolist()
    assert actions[0, 0] == -3.0


def test_discrete_actions_are_shifted_to_their_start():
    assert ActionCast(spaces.Discrete(3, start=-1), 3)(torch.tensor([[0.0], [1.0], [2.0]])).tolist() == [-1, 0, 1]
    many = ActionCast(spaces.MultiDiscrete([2, 3], start=[10, 20]), 2)(torch.tensor([[0, 1], [1, 2]]))
    assert many.tolist() == [[10, 21], [11, 22]]
    assert many.dtype == np.int64


def test_actions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"actions have shape \(4, 10\); the environment wants \(4, 12\)"):
        ActionCast(spaces.Box(-1, 1, (12,)), 4)(torch.zeros(4, 10))
    with pytest.raises(ValueError, match="actions have shape"):
        ActionCast(spaces.Box(-1, 1, (2,)), 4)(torch.zeros(2, 4))


def test_action_spaces_without_a_distribution_are_refused():
    with pytest.raises(TypeError, match="actions must be Box, Discrete or MultiDiscrete"):
        ActionCast(spaces.MultiBinary(3), 1)
    crossed = spaces.Box(-1, 1, (2,))
    crossed.low = crossed.high + 1
    with pytest.raises(ValueError, match="lower bound above its upper bound"):
        ActionCast(crossed, 1)


def test_every_environment_gets_its_own_seed():
    seeds = spawn_seeds(3, 100)
    assert len(set(seeds)) == 100
    assert seeds == spawn_seeds(3, 100)
    assert seeds[:50] == spawn_seeds(3, 50)
    assert seeds != spawn_seeds(4, 100)
