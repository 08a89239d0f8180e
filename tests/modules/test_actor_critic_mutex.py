"""Loading sub-policies from run directories, ours and others', and the errors for broken ones."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from canter.envs.torch_envs import PointRobot
from canter.modules.actor_critic_mutex import ActorCriticMutex
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.modules.build import POLICIES, build_actor_critic
from canter.modules.normalizer import EmpiricalNormalization
from canter.modules.policy import Policy
from canter.runners import OnPolicyRunner
from canter.utils.checkpoint import save_checkpoint

spec = importlib.util.spec_from_file_location("mutex_runs", Path(__file__).parent / "mutex_runs.py")
runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runs)
SHAPE = (runs.NUM_OBS, runs.NUM_OBS, runs.NUM_ACTIONS)


def made(paths, name="ActorCritic", **settings):
    return ActorCriticMutex(*SHAPE, name, paths, obs_segments=runs.SEGMENTS, **settings)


def two_runs(tmp_path, **second):
    a = runs.write_run(tmp_path / "a", runs.constant_policy(1.0))
    return [a, runs.write_run(tmp_path / "b", runs.constant_policy(2.0), **second)]


def test_every_path_becomes_a_sub_policy_with_its_weights(tmp_path):
    policy = made(two_runs(tmp_path))
    assert isinstance(policy, Policy)
    assert len(policy.submodules) == 2
    for sub, value in zip(policy.submodules, (1.0, 2.0), strict=True):
        assert (sub.actor[0].bias == value).all()
        assert not any(p.requires_grad for p in sub.parameters())
        assert not sub.training


def test_it_chooses_nothing_itself(tmp_path):
    policy = made(two_runs(tmp_path))
    for call in (policy.act, policy.act_inference, policy.infer, policy.evaluate, policy.value):
        with pytest.raises(NotImplementedError, match="ActorCriticMutex"):
            call(torch.zeros(1, runs.NUM_OBS))


def test_the_newest_model_counts_and_a_damaged_one_is_passed_over(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0), name="model_9.pt")
    runs.write_run(tmp_path / "a", runs.constant_policy(3.0), name="model_100.pt")
    assert made([path]).submodules[0].actor[0].bias[0] == 3.0
    (path / "model_200.pt").write_bytes(b"half a file")
    with pytest.warns(UserWarning, match="SKIPPING"):
        assert made([path]).submodules[0].actor[0].bias[0] == 3.0


def test_no_sub_policy_at_all_is_worth_a_warning():
    with pytest.warns(UserWarning, match="no sub_policy_paths"):
        made([])


def test_a_run_of_ours_is_loaded_with_its_normalisers(tmp_path):
    cfg = {
        "seed": 1,
        "num_steps_per_env": 4,
        "algorithm": {"empirical_normalization": True, "value_normalization": "popart"},
        "policy": {
            "class_name": "ActorCriticRecurrent",
            **runs.RNN,
            "actor_hidden_dims": [8],
            "critic_hidden_dims": [8],
        },
    }
    info = {"control": {"action_scale": [0.25, 0.5]}}
    runner = OnPolicyRunner(PointRobot(4), cfg, tmp_path, device="cpu", run_info=info, show_progress=False)
    runner.learn(2)
    runner.close()
    mutex = build_actor_critic(PointRobot(4), "ActorCriticMutex", {"sub_policy_paths": [str(tmp_path)]})
    (sub,) = mutex.submodules
    assert type(sub) is ActorCriticRecurrent
    assert isinstance(sub.obs_normalizer, EmpiricalNormalization)
    assert mutex.subpolicy_action_scale_0.tolist() == [0.25, 0.5]
    obs = torch.randn(4, 6)
    assert torch.equal(sub.infer(obs)[0], runner.policy.infer(obs)[0])
    assert mutex.obs_segments == PointRobot.obs_segments


def test_a_run_of_ours_that_says_no_scale_has_the_environments(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0), config_name="config.yaml", control=None)
    assert made([path], env_action_scale=0.3).subpolicy_action_scale_0 == torch.tensor(0.3)


# ---------------------------------------------------------------------- bad input
def test_a_directory_without_configuration_or_model_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has neither config.yaml nor config.json"):
        made([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a directory"):
        made([tmp_path / "nowhere"])
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0))
    (path / "model_10.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"a has no model"):
        made([path])


def test_two_models_without_numbers_leave_no_choice(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0), name="model.pt")
    assert made([path]).submodules[0].actor[0].bias[0] == 1.0
    runs.write_run(tmp_path / "a", runs.constant_policy(1.0), name="model_best.pt")
    with pytest.raises(ValueError, match=r"several models, model.pt, model_best.pt, and no number"):
        made([path])


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[1]", "holds a list"), ('{"policy": null}', "no section 'policy'")],
)
def test_a_configuration_that_says_nothing_is_refused(tmp_path, text, message):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0))
    (path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        made([path])


def test_foreign_class_and_setting_names_are_named_with_their_directory(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0))
    with pytest.raises(KeyError, match="a cannot be built: .*'ActorCritic'"):
        made([path], "ActorCritc")
    with pytest.raises(KeyError, match="'os.system'"):
        made([path], "os.system")
    runs.write_run(tmp_path / "b", runs.constant_policy(1.0), policy={**runs.POLICY, "activaton": "elu"})
    with pytest.warns(UserWarning, match="b.config.json: ignored activaton, which ActorCritic does not take"):
        made([tmp_path / "b"])


def test_a_model_of_another_shape_is_refused_tensor_by_tensor(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0))
    with pytest.raises(
        RuntimeError, match=r"a cannot be built: [^*]*shape of actor.0.weight: want \(12, 40\), got \(12, 56\)"
    ):
        ActorCriticMutex(40, 40, 12, "ActorCritic", [path])
    save_checkpoint(path / "model_11.pt", {"weights": {}})
    with pytest.raises(ValueError, match="has no model_state_dict"):
        made([path])


def test_a_foreign_configuration_has_to_say_its_action_scale(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0), control={})
    with pytest.raises(KeyError, match=r"config.json has no control.action_scale"):
        made([path])
    runs.write_run(tmp_path / "a", runs.constant_policy(1.0), action_scale=[0.5, 0.5])
    with pytest.raises(ValueError, match=r"control.action_scale of .*a is \[0.5, 0.5\] for 12 actions"):
        made([path])
    with pytest.raises(ValueError, match="env_action_scale is 0.0"):
        made([path], env_action_scale=0.0)


def test_unknown_settings_are_refused(tmp_path):
    with pytest.raises(TypeError, match="'env_action_scale'"):
        made(two_runs(tmp_path), env_action_scal=1.0)


def test_the_classes_are_known_by_name():
    assert {"ActorCriticMutex", "ActorCriticFieldMutex", "ActorCriticClimbMutex"} <= set(POLICIES)


def test_the_configuration_is_read_in_order(tmp_path):
    path = runs.write_run(tmp_path / "a", runs.constant_policy(1.0))
    assert list(made([path]).configs[0]) == list(json.loads((path / "config.json").read_text()))


# ---------------------------------------------------------------------- runs of runners
ROBOT = {"num_steps_per_env": 4, "save_interval": 0}
NETWORKS = {"actor_class": "MLPActor", "critic_class": "MLPCritic"}
SMALL = {"actor_cfg": {"hidden_dims": [8]}, "critic_cfg": {"hidden_dims": [8]}}


@pytest.mark.parametrize(
    "policy", [{"actor_hidden_dims": [8], "critic_hidden_dims": [8]}, {**NETWORKS, **SMALL}], ids=["dict", "classes"]
)
def test_a_run_directory_that_a_runner_wrote_needs_nothing_more(tmp_path, policy):
    env = PointRobot(4, max_episode_length=7)
    cfg = {**ROBOT, "policy": policy, "empirical_normalization": True}
    runner = OnPolicyRunner(env, cfg, tmp_path / "run", "cpu", show_progress=False)
    runner.learn(1)
    runner.close()
    assert (tmp_path / "run" / "config.json").is_file()
    mutex = build_actor_critic(env, "ActorCriticMutex", {"sub_policy_paths": [tmp_path / "run"]})
    assert mutex.subpolicy_action_scale_0 == mutex.env_action_scale
    obs = torch.randn(4, 6)
    assert torch.equal(mutex.submodules[0].infer(obs)[0], runner.policy.infer(obs)[0])
