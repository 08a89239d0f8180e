"""Environments by name with constructor arguments and wrappers by name."""

import gymnasium
import pytest

from canter.envs import ClipActions, ObsComponents, make_env
from canter.envs.wrap import env_options


def test_arguments_reach_every_gymnasium_environment():
    env = make_env("Pendulum-v1", num_envs=2, env_kwargs={"g": 5.0})
    assert [single.unwrapped.g for single in env.envs] == [5.0, 5.0]


def test_arguments_reach_torch_native_and_registered_environments():
    assert make_env("canter/PointRobot", num_envs=2, env_kwargs={"max_episode_length": 7}).max_episode_length == 7
    with pytest.raises(TypeError, match="colour"):
        make_env("canter/PointRobot", env_kwargs={"colour": "red"})


def test_wrappers_are_applied_in_their_order_gymnasium_ones_to_each_environment():
    wrappers = [
        {"RescaleAction": {"min_action": -0.5, "max_action": 0.5}},
        {"ClipActions": {"limit": 0.25}},
        "FlattenObs",
        {"NormalizeReward": None},
    ]
    env = make_env("Pendulum-v1", num_envs=2, wrappers=wrappers)
    assert type(env).__name__ == "FlattenObs"
    assert isinstance(env.env, ClipActions)
    assert env.env.limit == 0.25
    for single in env.env.env.envs:
        assert isinstance(single, gymnasium.wrappers.NormalizeReward)
        assert isinstance(single.env, gymnasium.wrappers.RescaleAction)
    assert env.action_space.high.tolist() == [0.5]


def test_a_wrapper_may_be_named_alone_by_module_or_in_a_mapping():
    alone = make_env("CartPole-v1", wrappers="gymnasium.wrappers:RecordEpisodeStatistics")
    assert isinstance(alone.envs[0], gymnasium.wrappers.RecordEpisodeStatistics)
    mapped = make_env("CartPole-v1", wrappers={"TimeAwareObservation": {}, "FlattenObservation": None})
    assert mapped.obs_space.shape == (5,)


def test_components_are_outermost():
    parts = {"segments": {"position": 4, "target": 2}, "actor": ["target"]}
    env = make_env("canter/PointRobot", wrappers={"ClipActions": {"limit": 0.5}}, components=parts)
    assert isinstance(env, ObsComponents)
    assert isinstance(env.env, ClipActions)


@pytest.mark.parametrize(
    ("task", "wrappers", "message"),
    [
        ("CartPole-v1", "ClipReward2", "'ClipReward'"),
        ("CartPole-v1", "zzz", "ChannelsFirst, .*module:Class"),
        (
            "canter/CartPole",
            "ClipReward",
            "ClipReward wraps single .*, and 'canter.CartPole' makes a batch",
        ),
    ],
)
def test_a_wrapper_that_does_not_exist_or_fit_is_an_error_with_the_way_out(task, wrappers, message):
    with pytest.raises(ValueError, match=message):
        make_env(task, wrappers=wrappers)


def test_wrappers_that_are_no_names_are_refused():
    with pytest.raises(TypeError, match="got 3"):
        make_env("CartPole-v1", wrappers=[3])


def test_the_options_of_a_run_leave_out_what_was_not_given():
    run = {"task": "a", "num_envs": 3, "env_kwargs": {"g": 1}, "wrappers": None}
    assert env_options(run) == {"env_kwargs": {"g": 1}}
