"""The page "runners" of st_rl, section by section; the bodies of learn and of get_transition, built upon."""

import inspect
import json
import os
from collections import deque

import numpy as np
import pytest
import torch

from canter.algorithms import PPO
from canter.datasets.dagger_saver import DaggerSaver as DaggerSaverOfDatasets
from canter.envs import PointRobot
from canter.modules import ActorCritic, EmpiricalNormalization
from canter.runners import AmpPolicyRunner, DaggerSaver, DemonstrationSaver, OnPolicyRunner, TwoStageRunner
from canter.storage import RolloutStorage
from canter.storage.rollout_files import RolloutDataset, TrajectoryWriter
from canter.storage.rollout_files.catalog import read_trajectory
from canter.utils.code_state import store_code_state

pytestmark = pytest.mark.filterwarnings("ignore:the training dict leaves out", "ignore:.*trajectories for .* env")
POLICY = {"class_name": "ActorCritic", "actor_hidden_dims": [8], "critic_hidden_dims": [8]}


def robot():
    return PointRobot(4, max_episode_length=5)


def train_cfg(algorithm=None, **top):
    settings = {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 1, **(algorithm or {})}
    return {"policy": dict(POLICY), "algorithm": settings, "num_steps_per_env": 3, "save_interval": 0, "seed": 1, **top}


def runner_on(cls=OnPolicyRunner, cfg=None, **more):
    return cls(robot(), train_cfg() if cfg is None else cfg, device="cpu", show_progress=False, **more)


class Documented(OnPolicyRunner):
    """The documented loop; the observations are a pair, and the steps are read by name."""

    def learn(self, num_learning_iterations, init_at_random_ep_len=False, trial=None):
        self.init_writter(init_at_random_ep_len)
        obs, critic_obs = self.env.get_observations()
        self.train_mode()
        rewbuffer = deque(maxlen=100)
        start_iter = self.current_learning_iteration
        for it in range(start_iter, start_iter + num_learning_iterations):
            with torch.inference_mode(self.cfg.get("inference_mode_rollout", True)):
                for _ in range(self.num_steps_per_env):
                    obs, critic_obs, rewards, dones, _infos = self.rollout_step(obs, critic_obs)
                    rewbuffer.extend(rewards[dones.bool()].tolist())
            self.alg.compute_returns(critic_obs)
            losses, stats = self.alg.update(self.current_learning_iteration)  # noqa: F841 (logged as locals)
            self.evaluation()
            if trial is not None:
                trial.report(self.metrics_velrmsd, self.current_learning_iteration)
            if self.log_dir is not None and self.current_learning_iteration % self.log_interval == 0:
                self.log(locals())
            self.current_learning_iteration += 1
            if it == start_iter:
                store_code_state(self.log_dir, self.git_status_repos)
        self.save(os.path.join(self.log_dir, f"model_{self.current_learning_iteration}.pt"))
        return self.metrics_velrmsd, self.metrics_CoT


# 1. amp_policy_runner.py
def test_1_amp_policy_runner_is_an_on_policy_runner():
    assert issubclass(AmpPolicyRunner, OnPolicyRunner)
    parameters = inspect.signature(AmpPolicyRunner.learn).parameters
    assert list(parameters)[1:4] == ["num_learning_iterations", "init_at_random_ep_len", "trial"]
    assert (parameters["init_at_random_ep_len"].default, parameters["trial"].default) == (False, None)


def test_1_the_documented_loop_trains_logs_and_saves(tmp_path, capsys):
    class Trial:
        reports = []

        def report(self, value, step):
            self.reports.append(step)

    runner = runner_on(Documented, log_dir=str(tmp_path))
    before = [p.detach().clone() for p in runner.policy.parameters()]
    runner.learn(2, init_at_random_ep_len=True, trial=Trial())
    runner.close()
    assert Trial.reports == [0, 1]
    assert all(not torch.equal(p, q) for p, q in zip(runner.policy.parameters(), before, strict=True))
    assert (tmp_path / "model_2.pt").is_file()
    assert "train/policy_loss" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2


def test_1_extras_in_place_of_the_critics_observation_is_an_error_that_says_what_there_is():
    class Literal(OnPolicyRunner):
        def learn(self, num_learning_iterations, init_at_random_ep_len=False, trial=None):
            obs, extras = self.env.get_observations()
            return extras["observations"].get("critic", obs)

    with pytest.raises(IndexError, match=r"gives \(obs, critic_obs\) instead of \(obs, extras\)"):
        runner_on(Literal).learn(1)

    class Unpacks(OnPolicyRunner):
        def learn(self, num_learning_iterations, init_at_random_ep_len=False, trial=None):
            _obs, _critic_obs, _rewards, _dones, _infos = self.env.step(torch.zeros(4, 2))

    with pytest.raises(ValueError, match="unpack.*a StepRecord with obs, critic_obs, reward"):
        runner_on(Unpacks).learn(1)


# 2. dagger_saver.py
class Teacher:
    def act_inference(self, obs):
        return torch.full((len(obs), 2), 0.25)

    act = act_inference

    def reset(self, dones=None):
        pass


@pytest.fixture
def student(tmp_path):
    path = tmp_path / "student"
    path.mkdir()
    config = {"policy": {**POLICY, "old_flag": 3}}
    (path / "config.json").write_text(json.dumps(config))
    torch.save({"model_state_dict": policy_for(robot()).state_dict(), "iter": 7}, path / "model_7.pt")
    return path


def policy_for(env):
    torch.manual_seed(0)
    settings = {name: value for name, value in POLICY.items() if name != "class_name"}
    return ActorCritic(env.num_obs, env.num_privileged_obs or env.num_obs, 2, **settings)


class DocumentedDagger(DaggerSaver):
    """The documented get_transition: the step unpacks to five values."""

    def get_transition(self):
        teacher_actions = self.get_policy_actions()
        actions = self.training_policy.act(self.obs)
        actions[self.use_teacher_act_mask] = teacher_actions[self.use_teacher_act_mask]
        n_obs, n_critic_obs, rewards, dones, infos = self.env.step(actions)
        return teacher_actions, rewards, dones, infos, n_obs, n_critic_obs


def test_2_dagger_savers_arguments_and_defaults():
    assert DaggerSaverOfDatasets is DaggerSaver
    assert issubclass(DaggerSaver, DemonstrationSaver)
    parameters = inspect.signature(DaggerSaver.__init__).parameters
    wanted = {
        "teacher_act_prob": "exp",
        "update_times_scale": 5000,
        "action_sample_std": 0.0,
        "log_to_tensorboard": False,
    }
    assert {name: parameters[name].default for name in wanted} == wanted
    assert parameters["training_policy_logdir"].default is inspect.Parameter.empty


@pytest.mark.parametrize("cls", [DaggerSaver, DocumentedDagger])
def test_2_the_documented_calls_of_a_dagger_saver(tmp_path, student, cls):
    saver = cls(
        robot(),
        Teacher(),
        tmp_path / "data",
        rollout_storage_length=6,
        min_timesteps=20,
        min_episodes=1,
        training_policy_logdir=student,
        teacher_act_prob=0.0,
        action_sample_std=0.1,
        log_to_tensorboard=True,
        show_progress=False,
    )
    with pytest.warns(UserWarning, match="ignored old_flag, which ActorCritic does not take"):
        saver.init_traj_handlers()
    saver.init_storage_buffer()
    assert saver.rollout_episode_infos == []
    assert saver.metadata["training_policy_logdir"]
    saver.load_latest_training_policy()
    assert saver.training_policy_iteration == 7
    assert saver.use_teacher_act_mask.tolist() == [False] * 4
    for step in range(6):
        saver.collect_step(step)
    saver.save_steps()
    assert "timesteps" in saver.print_log()
    assert saver.check_stop()  # 24 steps
    saver.close()
    [first, *_] = RolloutDataset(tmp_path / "data", 4, device="cpu")
    assert first.action.unique().tolist() == [0.25]  # always the teacher's labels
    assert first.observation.shape == (4, robot().num_obs)


# 3. demonstration.py
def test_3_demonstration_savers_arguments_in_order():
    names = list(inspect.signature(DemonstrationSaver.__init__).parameters)[1:]
    documented = ["env", "policy", "save_dir", "rollout_storage_length", "min_timesteps", "min_episodes"]
    documented += ["success_traj_only", "use_critic_obs", "obs_disassemble_mapping", "demo_by_sample"]
    assert names[: len(documented)] == documented


@pytest.mark.parametrize("by_sample", [False, True])
def test_3_a_policy_that_takes_critic_obs_gets_it(tmp_path, by_sample):
    class Both(Teacher):
        seen = []

        def act(self, obs, critic_obs):
            self.seen.append(critic_obs.shape)
            return torch.full((len(obs), 2), 0.25)

        act_inference = act

    saver = DemonstrationSaver(
        robot(), Both(), tmp_path / "demos", 4, 8, 1, False, False, None, by_sample, show_progress=False
    )
    saver.collect_and_save(config={"note": 1})
    assert set(Both.seen) == {(4, robot().num_privileged_obs)}
    metadata = json.loads((tmp_path / "demos" / "metadata.json").read_text())
    assert metadata["config"] == {"note": 1}
    assert metadata["total_timesteps"] >= 8


def test_3_demonstrations_continue_and_are_stored_per_trajectory(tmp_path):
    for total in (8, 24):
        with DemonstrationSaver(
            robot(),
            policy_for(robot()),
            tmp_path / "demos",
            4,
            min_timesteps=total,
            min_episodes=1,
            show_progress=False,
        ) as saver:
            saver.collect_and_save()
            assert saver.total_timesteps >= total
    folders = sorted((tmp_path / "demos").glob("trajectory_*"))
    assert len(folders) >= 4
    pieces = read_trajectory(folders[0])
    assert pieces is not None


# 4. on_policy_runner.py
def test_4_1_the_constructor_and_what_it_makes(tmp_path):
    runner = OnPolicyRunner(robot(), train_cfg({"empirical_normalization": True}), str(tmp_path), "cpu")
    assert isinstance(runner.alg, PPO)
    assert isinstance(runner.alg.storage, RolloutStorage)
    assert isinstance(runner.alg.obs_normalizer, EmpiricalNormalization)
    runner.close()


def test_4_2_to_4_11_the_documented_methods(tmp_path, capsys):
    runner = runner_on(log_dir=str(tmp_path))
    runner.init_writer(False)
    runner.init_writter(init_at_random_ep_len=True)
    velrmsd, cot = runner.learn(num_learning_iterations=2)
    assert (velrmsd, cot) == (runner.metrics_velrmsd, runner.metrics_CoT)
    runner.evaluation()
    assert runner.metrics_velrmsd == pytest.approx(float(runner.env.tracking_error.mean()))
    obs, critic_obs = runner.env.get_observations()
    out = runner.rollout_step(obs, critic_obs)
    assert [part.shape[0] for part in out[:4]] == [4] * 4
    assert isinstance(out[4], dict)
    losses, stats, velocity = {"surrogate_loss": torch.tensor(0.5)}, {"kl": torch.tensor(0.1)}, 0.25
    text = runner.log(locs={"losses": losses, "stats": stats, "velocity": velocity}, width=80, pad=35)
    assert "train/policy_loss" in text
    assert "velocity" in text
    assert capsys.readouterr().out
    runner.save(path=str(tmp_path / "mine.pt"), infos={"note": 3})
    assert runner.load(str(tmp_path / "mine.pt"), load_optimizer=True, map_location=None) == {"note": 3}
    policy = runner.get_inference_policy(device="cpu")
    assert policy(obs).shape == (4, 2)
    normalizer = EmpiricalNormalization(obs.shape[1])
    with pytest.raises(ValueError, match="normalised already"):
        policy(normalizer(obs))
    runner.train_mode()
    assert runner.policy.training
    runner.eval_mode()
    assert not runner.policy.training
    runner.add_git_repo_to_log(__file__)
    assert __file__ in runner.git_status_repos
    runner.close()


def test_4_8_an_old_checkpoint_goes_through_the_manipulator(tmp_path):
    runner = runner_on(cfg=train_cfg(ckpt_manipulator=lambda source, target: {**source, "iter": 40}))
    runner.save(str(tmp_path / "a.pt"))
    runner.load(str(tmp_path / "a.pt"))
    assert runner.current_learning_iteration == 40
    assert (tmp_path / "manipulated_a.pt").is_file()


# 5. two_stage_runner.py
@pytest.fixture
def demos(tmp_path):
    width = robot().num_obs
    with TrajectoryWriter(tmp_path / "demos") as writer:
        for k in range(4):
            steps = {"observations": np.zeros((7, width), np.float32), "actions": np.full((7, 2), 0.5, np.float32)}
            steps["privileged_observations"] = np.zeros((7, robot().num_privileged_obs), np.float32)
            steps |= {"rewards": np.ones((7, 1), np.float32), "dones": np.zeros((7, 1), np.uint8)}
            writer.add(k, steps, 0, "truncated")
    return str(tmp_path / "demos")


def test_5_two_stages(demos):
    cfg = train_cfg(
        {"class_name": "TPPO"}, pretrain_iterations=1, pretrain_dataset={"data_dir": demos, "dataset_loops": -1}
    )
    runner = runner_on(TwoStageRunner, cfg)
    assert runner.cfg["pretrain_dataset"]["data_dir"] == demos
    assert runner.cfg["pretrain_iterations"] == 1
    assert runner.log_interval == 50
    assert isinstance(runner.rollout_dataset, RolloutDataset)
    assert runner.rollout_dataset.num_envs == runner.env.num_envs
    obs, critic_obs = runner.env.get_observations()
    next_obs, _, reward, done, infos = runner.rollout_step(obs, critic_obs)
    assert reward.tolist() == [1.0] * 4
    assert (next_obs.abs().sum(), done.shape) == (0.0, (4,))
    assert isinstance(infos, dict)
    runner.alg.storage.clear()
    runner.learn(2)
    assert not runner.is_pretraining
    with pytest.raises(AssertionError, match="pretrain_dataset"):
        runner_on(TwoStageRunner, train_cfg({"class_name": "TPPO"}))


def test_5_a_subclass_may_take_its_own_steps_from_the_dataset(demos):
    class Mine(TwoStageRunner):
        from_dataset = 0

        def rollout_step(self, obs, critic_obs):
            if self.current_learning_iteration < self.pretrain_iterations:
                transition, infos = self.rollout_dataset.get_transition_batch()
                if transition is not None:
                    self.alg.collect_transition_from_dataset(transition, infos)
                    Mine.from_dataset += 1
                    self.stats.tracker.step += 1
                    following = transition.next_observation, transition.next_privileged_observation
                    return *following, transition.reward, transition.done, infos
            return super().rollout_step(obs, critic_obs)

    settings = {"data_dir": demos, "dataset_loops": -1}
    cfg = train_cfg({"class_name": "TPPO"}, pretrain_iterations=1, pretrain_dataset=settings)
    runner = runner_on(Mine, cfg)
    runner.learn(2)
    assert Mine.from_dataset == 3
