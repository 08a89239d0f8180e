"""Distillation dicts of rsl_rl 2.x, 3.x and 5.x: the teacher is a loaded checkpoint, the student learns its actions."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from canter.compat.training_dicts import Translation
from canter.envs import Pendulum
from canter.modules import ActorCriticRecurrent
from canter.runners import OnPolicyRunner
from canter.runners.run_config import parse_train_cfg

pytest.importorskip("tensordict")
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent / "rsl_rl"))
from peer import PeerEnv

DATA = Path(__file__).parent / "rsl_rl"
RUN = {"num_steps_per_env": 20, "save_interval": 100, "max_iterations": 60, "experiment_name": "swing", "seed": 3}
ALGORITHM = {"class_name": "Distillation", "num_learning_epochs": 2, "gradient_length": 5, "learning_rate": 0.003}
VERSIONS = (2, 3, 5)
every_version = pytest.mark.parametrize("version", VERSIONS)


class Swing:
    """Pendulums with the groups policy and teacher; without `sees_speed` the student observes the angle alone."""

    num_envs, num_actions, device, max_episode_length = 32, 1, "cpu", 200

    def __init__(self, version, sees_speed=True):
        self.inner, self.version, self.width = Pendulum(32, seed=4), version, 3 if sees_speed else 2
        self.episode_length_buf = torch.zeros(32, dtype=torch.long)

    def seed(self, seed):
        self.inner.seed(seed)

    def groups(self, obs):
        if self.version == 2:
            return obs[:, : self.width], {"observations": {"teacher": obs}}
        return TensorDict({"policy": obs[:, : self.width], "teacher": obs}, batch_size=[32])

    def get_observations(self):
        return self.groups(self.inner.get_observations()[0])

    def reset(self):
        return self.groups(self.inner.reset()[0])

    def step(self, actions):
        record = self.inner.step(actions)
        extras = {"time_outs": record.truncated}
        obs, done = self.groups(record.obs), record.terminated | record.truncated
        return (
            (*obs[:1], record.reward, done, obs[1] | extras)
            if self.version == 2
            else (obs, record.reward, done, extras)
        )


def student_cfg(version, rnn=None, **algorithm):
    """A student that can be distilled, as a user of this version writes it."""
    memory = {"rnn_type": rnn, "rnn_hidden_dim": 24, "rnn_num_layers": 1} if rnn else {}
    cfg = copy.deepcopy({**RUN, "algorithm": ALGORITHM | algorithm})
    if version == 5:
        noise = {"class_name": "GaussianDistribution", "init_std": 0.1, "std_type": "scalar"}
        student = {"class_name": "RNNModel" if rnn else "MLPModel", "hidden_dims": [24], "activation": "elu", **memory}
        teacher = {"class_name": "MLPModel", "hidden_dims": [2], "activation": "tanh", "obs_normalization": False}
        cfg |= {
            "student": student | {"distribution_cfg": noise},
            "teacher": teacher | {"distribution_cfg": dict(noise)},
        }
        return cfg | {"obs_groups": {"student": ["policy"], "teacher": ["teacher"]}}
    policy = {"class_name": "StudentTeacherRecurrent" if rnn else "StudentTeacher", "init_noise_std": 0.1, **memory}
    policy |= {"student_hidden_dims": [24], "teacher_hidden_dims": [2], "activation": "tanh"}
    if version == 3:
        cfg["obs_groups"] = {"policy": ["policy"], "teacher": ["teacher"]}
        policy |= {"student_obs_normalization": False, "teacher_obs_normalization": False}
    return cfg | {"policy": policy}


def teacher_file(version, path):
    """The checkpoint of a PPO run whose actor is action = 2 tanh(sin + 0.2 speed) - tanh(cos)."""
    weights = {"0.weight": torch.tensor([[0.0, 1.0, 0.2], [1.0, 0.0, 0.0]]), "0.bias": torch.zeros(2)}
    weights |= {"2.weight": torch.tensor([[2.0, -1.0]]), "2.bias": torch.zeros(1)}
    critic = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)).state_dict()
    if version == 5:
        actor = {f"mlp.{name}": value for name, value in weights.items()} | {"distribution.std_param": torch.ones(1)}
        state = {"actor_state_dict": actor, "critic_state_dict": {f"mlp.{name}": v for name, v in critic.items()}}
    else:
        named = {f"actor.{name}": v for name, v in weights.items()} | {f"critic.{n}": v for n, v in critic.items()}
        state = {"model_state_dict": {"std": torch.ones(1), **named}}
    torch.save({**state, "optimizer_state_dict": {}, "iter": 700, "infos": {"from": "teacher"}}, path)
    return str(path)


def wanted(obs):
    return 2 * torch.tanh(obs[:, 1:2] + 0.2 * obs[:, 2:3]) - torch.tanh(obs[:, :1])


def make(version, rnn=None, sees_speed=True, **algorithm):
    cfg = student_cfg(version, rnn, **algorithm)
    return OnPolicyRunner(Swing(version, sees_speed), cfg, device="cpu", show_progress=False)


@every_version
def test_the_student_learns_the_teachers_actions(version, tmp_path):
    runner = make(version)
    assert runner.load(teacher_file(version, tmp_path / "model_700.pt")) == {"from": "teacher"}
    assert runner.current_learning_iteration == 0
    losses = [entry["train/distillation_loss"] for entry in runner.learn(40).history]
    assert sum(losses[-10:]) / 10 < losses[0] / 5
    obs = runner.env.get_observations()[1]
    act = runner.get_inference_policy()
    assert (act(obs) - wanted(obs)).square().mean() < losses[0] / 5


@pytest.mark.parametrize(("version", "rnn"), [(2, "gru"), (3, "lstm"), (5, "gru")])
def test_a_recurrent_student_infers_what_only_the_teacher_observes(version, rnn, tmp_path):
    runner = make(version, rnn, sees_speed=False, learning_rate=0.01)
    assert (runner.env.num_obs, runner.env.num_privileged_obs) == (2, 3)
    assert isinstance(runner.policy, ActorCriticRecurrent)
    runner.load(teacher_file(version, tmp_path / "teacher.pt"))
    losses = [entry["train/distillation_loss"] for entry in runner.learn(40).history]
    assert sum(losses[-10:]) / 10 < losses[0] / 5  # one episode; how far actions are apart depends on its phase


@every_version
def test_labels_are_the_teachers_mean_and_the_student_acts(version, tmp_path):
    runner = make(version)
    runner.load(teacher_file(version, tmp_path / "teacher.pt"))
    obs, critic_obs = runner.env.get_observations()
    with torch.inference_mode():
        actions = runner.alg.act(obs, critic_obs)
    torch.testing.assert_close(runner.alg.transition.action_labels, wanted(critic_obs))
    assert (actions - runner.policy.act_inference(obs)).abs().max() < 0.6  # six times the noise


@every_version
def test_without_a_teacher_learning_is_refused(version):
    with pytest.raises(ValueError, match=r"no teacher was loaded.*load\(path\)"):
        make(version).learn(1)


@every_version
def test_a_student_resumes_with_its_teacher(version, tmp_path):
    first = make(version)
    first.load(teacher_file(version, tmp_path / "teacher.pt"))
    first.learn(3)
    first.save(tmp_path / "student.pt")
    for cfg in (student_cfg(version), first.config()):  # the dict, and the config.yaml of the run
        again = OnPolicyRunner(Swing(version), cfg, device="cpu", show_progress=False)
        again.load(tmp_path / "student.pt")
        assert again.current_learning_iteration == 3
        obs, critic_obs = again.env.get_observations()
        torch.testing.assert_close(again.alg.teacher_actor_critic.act_inference(critic_obs), wanted(critic_obs))
        torch.testing.assert_close(again.policy.state_dict(), first.policy.state_dict())
        again.learn(1)


@pytest.mark.parametrize(
    "file", sorted(set(DATA.glob("*.pt")) - {DATA / "rsl_rl_5_beta.pt"}), ids=lambda file: file.stem
)
def test_checkpoints_of_rsl_rls_own_runs_are_teachers(file):
    infos = torch.load(file, weights_only=True)["infos"]
    version, cfg = int(infos["version"][0]), infos["cfg"]
    sets = {"student": ["command"], "teacher": ["proprio", "command"]}
    source = cfg.get("actor") or cfg["policy"]
    teacher = {name: value for name, value in source.items() if not name.startswith("critic")}
    if "actor" not in cfg:
        teacher = {name.removeprefix("actor_"): value for name, value in teacher.items()}
        teacher["class_name"] = "RNNModel" if teacher["class_name"].endswith("Recurrent") else "MLPModel"
    student = {"class_name": "MLPModel", "hidden_dims": [4], "distribution_cfg": {"class_name": "GaussianDistribution"}}
    run = {"num_steps_per_env": 4, "algorithm": {"class_name": "Distillation", "gradient_length": 4}}
    cfg = {**run, "student": student, "teacher": teacher, "obs_groups": sets}
    runner = OnPolicyRunner(PeerEnv(max(version, 3)), cfg, device="cpu", show_progress=False)
    runner.load(file)
    for step, (obs, actions) in enumerate(zip(infos["obs"], infos["actions"], strict=True)):
        if step == 2:
            runner.alg.teacher_actor_critic.reset(infos["dones"])
        seen = torch.cat([obs["proprio"], obs["command"]], 1)
        torch.testing.assert_close(runner.alg.teacher_actor_critic.act_inference(seen), actions, rtol=0, atol=1e-6)
    runner.learn(1)


def test_every_setting_of_the_algorithm_has_its_place():
    given = {"loss_type": "huber", "optimizer": "adamw", "max_grad_norm": 0.7, "use_mixed_precision": True}
    plan = parse_train_cfg(student_cfg(5, num_learning_epochs=3, **given))
    cfg = plan.cfg
    assert (plan.algorithm, cfg.using_ppo, cfg.teacher_act_prob, cfg.schedule) == ("TPPO", False, 0.0, "fixed")
    assert (cfg.distill_target, cfg.optimizer_class_name, cfg.max_grad_norm) == ("huber", "adamw", 0.7)
    assert (cfg.num_learning_epochs, cfg.learning_rate, cfg.precision) == (3, 0.003, "bf16")
    # Four chunks of five steps per epoch, whose losses are added up.
    assert (cfg.num_mini_batches, cfg.gradient_length, cfg.distillation_loss_coef) == (4, 5, 5.0)
    defaults = parse_train_cfg(student_cfg(5) | {"algorithm": {"class_name": "Distillation"}, "num_steps_per_env": 30})
    assert (defaults.cfg.num_learning_epochs, defaults.cfg.learning_rate) == (1, 0.001)
    assert (defaults.cfg.gradient_length, defaults.cfg.num_mini_batches) == (15, 2)
    assert (defaults.cfg.distill_target, defaults.cfg.max_grad_norm) == ("mse", float("inf"))


def test_the_networks_are_those_of_the_dict():
    cfg = student_cfg(3, "lstm")
    cfg["policy"] |= {"student_obs_normalization": True, "teacher_recurrent": True, "noise_std_type": "log"}
    plan = parse_train_cfg(cfg)
    assert plan.policy["class_name"] == plan.cfg.teacher_policy["class_name"] == "ActorCriticRecurrent"
    assert (plan.policy["actor_hidden_dims"], plan.cfg.teacher_policy["actor_hidden_dims"]) == ([24], [2])
    assert (plan.policy["init_noise_std"], plan.policy["noise_std_type"]) == (0.1, "log")
    assert (plan.policy["rnn_hidden_size"], plan.cfg.teacher_policy["rnn_hidden_size"]) == (24, 24)
    assert plan.cfg.empirical_normalization
    cfg["policy"]["class_name"] = "StudentTeacher"
    plan = parse_train_cfg(cfg)
    assert plan.policy["class_name"] == plan.cfg.teacher_policy["class_name"] == "ActorCritic"
    assert "rnn_type" not in plan.policy


def test_a_student_without_a_distribution_acts_by_its_mean(tmp_path):
    cfg = student_cfg(5)
    cfg["student"]["distribution_cfg"] = None
    runner = OnPolicyRunner(Swing(5), cfg, device="cpu", show_progress=False)
    runner.load(teacher_file(5, tmp_path / "teacher.pt"))
    obs, critic_obs = runner.env.get_observations()
    with torch.inference_mode():
        actions = runner.alg.act(obs, critic_obs)
    torch.testing.assert_close(actions, runner.policy.act_inference(obs), atol=1e-5, rtol=0)


def test_the_teachers_group_is_found_without_obs_groups():
    runner = make(2, sees_speed=False)
    assert runner.env.sets == (["policy"], ["teacher"])
    env = PeerEnv(3)
    env.draw()
    cfg = {**student_cfg(5), "obs_groups": {"student": ["command"], "teacher": ["proprio"]}}
    assert OnPolicyRunner(env, cfg, device="cpu", show_progress=False).env.sets == (["command"], ["proprio"])


def test_keys_that_change_nothing_are_listed():
    cfg = student_cfg(5, grad_reduce_bucket_mb=25) | {"class_name": "DistillationRunner", "policy": {"x": 1}}
    translation = Translation(cfg)
    translation.run()
    names = {"policy", "teacher.obs_normalization", "algorithm.grad_reduce_bucket_mb", "class_name", "experiment_name"}
    assert set(translation.unused) == names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm.gradient_length": 15}, "gradient_length=15 does not divide num_steps_per_env=20.*use 10"),
        ({"algorithm.loss_type": "l1"}, "algorithm.loss_type='l1' is not known; there are mse and huber"),
        ({"algorithm.entropy_coef": 0.1}, "'algorithm.entropy_coef'"),
        ({"algorithm.rnd_cfg": {"weight": 1.0}}, "'algorithm.rnd_cfg'"),
        ({"student.class_name": "CNNModel"}, "student.class_name='CNNModel' cannot be distilled"),
        ({"student.hiden_dims": [3]}, r"'student.hidden_dims'"),
        ({"teacher.hiden_dims": [3]}, r"'teacher.hidden_dims'"),
        (
            {"student.distribution_cfg": {"class_name": "BetaDistribution"}},
            "student.distribution_cfg: BetaDistribution",
        ),
        ({"teacher.distribution_cfg": {"class_name": "Cauchy"}}, "teacher.distribution_cfg.class_name='Cauchy'"),
        ({"teacher": None}, "needs the sections student and teacher, got student"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_an_error_that_names_it(change, message):
    cfg = student_cfg(5)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        (cfg[section] if section else cfg)[name] = value
    with pytest.raises(ValueError, match=message):
        parse_train_cfg(cfg)


def test_policies_of_ppo_and_of_distillation_are_not_mixed():
    with pytest.raises(
        ValueError, match="policy.class_name='StudentTeacher' needs algorithm.class_name='Distillation'"
    ):
        parse_train_cfg(student_cfg(2) | {"algorithm": {"class_name": "PPO"}})
    cfg = student_cfg(2)
    cfg["policy"]["class_name"] = "ActorCritic"
    with pytest.raises(ValueError, match="policy.class_name='ActorCritic' is no policy of Distillation"):
        parse_train_cfg(cfg)


def test_a_teacher_of_another_size_is_an_error(tmp_path):
    cfg = student_cfg(5)
    cfg["teacher"]["hidden_dims"] = [9]
    runner = OnPolicyRunner(Swing(5), cfg, device="cpu", show_progress=False)
    with pytest.raises(ValueError, match=r"(?s)teacher.pt is of another policy.*actor.0.weight"):
        runner.load(teacher_file(5, tmp_path / "teacher.pt"))


def test_gradients_of_a_memory_flow_through_gradient_length_steps(tmp_path):
    runner = make(5, "gru", sees_speed=False)
    runner.load(teacher_file(5, tmp_path / "teacher.pt"))
    runner.alg.train_mode()
    runner.start(False)
    with torch.inference_mode():
        runner.collect()
    storage = runner.alg.rollout
    assert storage.max_length == 5
    [(envs, total), *_] = storage.env_minibatches(1)
    batch = storage.take_envs(envs, total)
    assert batch.trajectories.row.max() == 4
    assert set(batch.trajectories.row[:5, 0].tolist()) == set(range(5))


@every_version
def test_a_student_of_rsl_rl_gives_its_actions_and_learns_on(version, tmp_path):
    student = nn.Sequential(nn.Linear(3, 24), nn.ELU() if version == 5 else nn.Tanh(), nn.Linear(24, 1))
    teacher = torch.load(teacher_file(version, tmp_path / "teacher.pt"), weights_only=True)
    if version == 5:
        own = {f"mlp.{name}": value for name, value in student.state_dict().items()}
        own["distribution.std_param"] = torch.tensor([0.1])
        state = {"student_state_dict": own, "teacher_state_dict": teacher["actor_state_dict"]}
    else:
        weights = {f"student.{name}": value for name, value in student.state_dict().items()}
        actor = {name: value for name, value in teacher["model_state_dict"].items() if name.startswith("actor.")}
        weights |= {name.replace("actor.", "teacher."): value for name, value in actor.items()}
        state = {"model_state_dict": {"std": torch.tensor([0.1]), **weights}}
    torch.save({**state, "optimizer_state_dict": {"state": {}}, "iter": 9, "infos": None}, tmp_path / "model_9.pt")
    runner = make(version)
    with pytest.warns(UserWarning, match="has no optimizer_state_dict: it keeps its fresh state"):
        runner.load(tmp_path / "model_9.pt")
    assert runner.current_learning_iteration == 9
    obs, critic_obs = runner.env.get_observations()
    torch.testing.assert_close(runner.policy.act_inference(obs), student(obs))
    torch.testing.assert_close(runner.alg.teacher_actor_critic.act_inference(critic_obs), wanted(critic_obs))
    runner.learn(1)


def test_load_cfg_selects_the_student(tmp_path):
    first, second = make(5), make(5)
    first.load(teacher_file(5, tmp_path / "teacher.pt"))
    first.learn(1)
    first.save(tmp_path / "student.pt")
    second.load(tmp_path / "student.pt", load_cfg={"student": True, "teacher": True})
    torch.testing.assert_close(second.policy.state_dict(), first.policy.state_dict())
    assert (second.current_learning_iteration, second.alg.optimizer.state_dict()["state"]) == (0, {})
    torch.nn.init.zeros_(second.policy.actor[0].weight)
    second.load(tmp_path / "student.pt", load_cfg={"student": False, "teacher": True})
    assert not second.policy.actor[0].weight.any()
