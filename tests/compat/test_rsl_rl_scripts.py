"""What the train and play scripts of Isaac Lab and mjlab touch on a runner and its policy."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from canter.runners import OnPolicyRunner

pytest.importorskip("tensordict")

sys.path.insert(0, str(Path(__file__).parent / "rsl_rl"))
from peer import PeerEnv, model_cfg, policy_cfg


def runner_on(cfg, style=5, cls=OnPolicyRunner, **given):
    torch.manual_seed(0)
    return cls(PeerEnv(style), copy.deepcopy(cfg), device="cpu", show_progress=False, **given)


class Exporter(torch.nn.Module):
    """Isaac Lab's pattern: copies of the actor, of its memory and of the normaliser, scripted."""

    def __init__(self, policy, normalizer):
        super().__init__()
        self.actor, self.normalizer = copy.deepcopy(policy.actor), copy.deepcopy(normalizer)

    def forward(self, x):
        return self.actor(self.normalizer(x))


class RecurrentExporter(Exporter):
    def __init__(self, policy, normalizer):
        super().__init__(policy, normalizer)
        self.rnn = copy.deepcopy(policy.memory_a.rnn)
        shape = (self.rnn.num_layers, 1, self.rnn.hidden_size)
        self.register_buffer("hidden_state", torch.zeros(shape))
        self.register_buffer("cell_state", torch.zeros(shape))

    def forward(self, x):
        x = self.normalizer(x)
        x, (h, c) = self.rnn(x.unsqueeze(0), (self.hidden_state, self.cell_state))
        self.hidden_state[:] = h
        self.cell_state[:] = c
        return self.actor(x.squeeze(0))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("rnn", [None, "lstm"])
def test_isaac_labs_exporter_gives_the_actions_of_act_inference(tmp_path, rnn, normalized):
    runner = runner_on(policy_cfg(3, rnn, normalized), 3)
    runner.learn(2)
    act = runner.get_inference_policy(device=runner.env.unwrapped.device)
    policy = runner.alg.policy
    assert hasattr(policy, "actor_obs_normalizer")
    exported = (RecurrentExporter if policy.is_recurrent else Exporter)(policy, policy.actor_obs_normalizer)
    torch.jit.script(exported).save(str(tmp_path / "policy.pt"))
    loaded = torch.jit.load(str(tmp_path / "policy.pt"))
    policy.reset()
    for _ in range(3):
        obs = 3 * torch.randn(1, 5)
        torch.testing.assert_close(loaded(obs), policy.act_inference(obs), rtol=0, atol=1e-6)
    assert policy.actor_obs_normalizer.training is False
    assert act is not None


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("rnn", [None, "lstm"])
def test_the_stateful_calls_take_the_tensordict_of_the_environment(rnn, normalized):
    runner = runner_on(policy_cfg(3, rnn, normalized), 3)
    runner.learn(1)
    runner.eval_mode()
    policy, groups = runner.alg.policy, runner.env.unwrapped.get_observations()
    obs, results = torch.cat([groups["proprio"], groups["command"]], 1), []
    for given, critic_given in ((obs, groups["critic"]), (groups, groups)):
        policy.reset()
        policy.generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            results.append((policy.act_inference(given), policy.evaluate(critic_given), policy.act(given)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    policy.reset()
    torch.testing.assert_close(runner.get_inference_policy("cpu")(groups), results[0][0], rtol=0, atol=0)
    with pytest.raises(KeyError, match="'command' is none of"):
        policy.act_inference({"proprio": groups["proprio"]})


@pytest.mark.parametrize("rnn", [None, "lstm", "gru"])
def test_the_real_exporter_of_isaac_lab_writes_the_actions_of_act_inference(tmp_path, rnn):
    exporter = pytest.importorskip("isaaclab_rl.rsl_rl.exporter", reason="needs Isaac Lab: pip install isaaclab")
    runner = runner_on(policy_cfg(3, rnn, True), 3)
    runner.learn(2)
    runner.get_inference_policy()
    policy = runner.alg.policy
    exporter.export_policy_as_jit(policy, policy.actor_obs_normalizer, str(tmp_path))
    exporter.export_policy_as_onnx(policy, str(tmp_path), policy.actor_obs_normalizer)
    loaded = torch.jit.load(str(tmp_path / "policy.pt"))
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "policy.onnx")
    names = [port.name for port in session.get_inputs()]
    state = [np.zeros(port.shape, np.float32) for port in session.get_inputs()[1:]]
    policy.reset()
    for _ in range(3):
        obs = 3 * torch.randn(1, 5)
        want = policy.act_inference(obs).detach()
        torch.testing.assert_close(loaded(obs), want, rtol=0, atol=1e-6)
        actions, *state = session.run(None, dict(zip(names, [obs.numpy(), *state], strict=True)))
        torch.testing.assert_close(torch.from_numpy(actions), want, rtol=0, atol=1e-6)


def test_the_real_factory_of_isaac_lab_makes_canters_runner_which_resumes_as_its_script_does(tmp_path, monkeypatch):
    utils = pytest.importorskip("isaaclab_rl.rsl_rl.utils", reason="needs Isaac Lab 3: pip install isaaclab")
    from isaaclab_rl import rsl_rl
    from isaaclab_rl.entrypoints.backends.cli_args_rsl_rl import checkpoint_load_cfg

    monkeypatch.setattr(utils, "OnPolicyRunner", OnPolicyRunner)
    noise = rsl_rl.RslRlMLPModelCfg.GaussianDistributionCfg(init_std=0.5)
    cfg = rsl_rl.RslRlOnPolicyRunnerCfg(
        device="cpu",
        num_steps_per_env=6,
        max_iterations=2,
        save_interval=1,
        experiment_name="peer",
        obs_groups={"actor": ["proprio", "command"], "critic": ["critic"]},
        actor=rsl_rl.RslRlMLPModelCfg(hidden_dims=[6], activation="elu", distribution_cfg=noise),
        critic=rsl_rl.RslRlMLPModelCfg(hidden_dims=[5], activation="elu"),
        algorithm=rsl_rl.RslRlPpoAlgorithmCfg(
            num_learning_epochs=2,
            num_mini_batches=2,
            learning_rate=1e-3,
            schedule="adaptive",
            gamma=0.99,
            lam=0.95,
            entropy_coef=0.01,
            desired_kl=0.01,
            max_grad_norm=1.0,
            value_loss_coef=1.0,
            use_clipped_value_loss=True,
            clip_param=0.2,
        ),
    )
    cfg = utils.handle_deprecated_rsl_rl_cfg(cfg, utils.check_rsl_rl_version())
    runner = utils.create_rsl_rl_runner(PeerEnv(5), cfg, log_dir=str(tmp_path))
    assert type(runner) is OnPolicyRunner
    runner.add_git_repo_to_log(__file__)
    runner.learn(num_learning_iterations=cfg.max_iterations, init_at_random_ep_len=cfg.init_at_random_ep_len)
    for keeps_optimizer in (True, False):
        again = utils.create_rsl_rl_runner(PeerEnv(5), cfg)
        load_cfg = checkpoint_load_cfg(keeps_optimizer, runner_class=cfg.class_name)
        again.load(str(tmp_path / "model_2.pt"), load_cfg=load_cfg, map_location=cfg.device)
        assert again.current_learning_iteration == 2
        states = again.alg.optimizer.state_dict()["state"]
        assert any(state["exp_avg"].any() for state in states.values()) is keeps_optimizer
    again.export_policy_to_jit(path=str(tmp_path / "exported"), filename="policy.pt")
    again.export_policy_to_onnx(path=str(tmp_path / "exported"), filename="policy.onnx")
    assert len(list((tmp_path / "exported").iterdir())) == 2


def test_the_actor_of_a_wide_unaligned_observation_can_be_scripted():
    runner = runner_on({**policy_cfg(3), "obs_groups": {"policy": ["proprio", "command", "critic"]}}, 3)
    assert runner.policy.actor[0].in_features == 9  # padded on a GPU
    scripted = torch.jit.script(copy.deepcopy(runner.policy.actor))
    obs = torch.randn(4, 9)
    torch.testing.assert_close(scripted(obs), runner.policy.act_inference(obs))


@pytest.mark.parametrize("resets", ["policy", "policy_nn"])
def test_the_loop_of_play_resets_the_memory_of_ended_episodes(resets):
    runner = runner_on(model_cfg("lstm", (True, False)))
    runner.learn(1)
    env = runner.env.unwrapped
    policy, policy_nn = runner.get_inference_policy(device=env.device), runner.alg.get_policy()
    obs, dones = env.get_observations(), torch.tensor([0, 1, 0, 1])
    with torch.inference_mode():
        first = policy(obs)
        later = policy(obs)
        (policy if resets == "policy" else policy_nn).reset(dones)
        after = policy(obs)
    torch.testing.assert_close(after[[1, 3]], first[[1, 3]])
    assert not torch.allclose(after[[0, 2]], first[[0, 2]], atol=1e-5)
    assert not torch.allclose(later, first, atol=1e-5)


def test_the_train_script_of_mjlab_finds_what_it_calls(tmp_path):
    cfg = {**model_cfg(), "upload_model": False, "logger": "tensorboard", "save_interval": 2}
    runner = runner_on(cfg, log_dir=str(tmp_path))
    runner.add_git_repo_to_log(__file__)
    assert __file__ in runner.logger.git_status_repos
    runner.learn(num_learning_iterations=3, init_at_random_ep_len=True)
    assert runner.logger.log_dir == str(tmp_path)
    assert runner.logger.logger_type == "tensorboard"
    assert runner.logger.writer is runner.writer is not None
    assert (runner.is_distributed, runner.gpu_global_rank, runner.gpu_local_rank, runner.gpu_world_size) == (
        False,
        0,
        0,
        1,
    )
    assert runner.cfg["upload_model"] is False
    assert runner.cfg["save_interval"] == 2
    assert runner.cfg["algorithm"]["class_name"] == "PPO"
    assert runner.cfg.get("not_there", 7) == 7
    with pytest.raises(KeyError):
        runner.cfg["not_there"]
    assert runner.current_learning_iteration == 3
    assert runner.alg.get_policy() is runner.alg.policy is runner.alg.actor_critic
    assert runner.env.unwrapped.step_dt == 0.02
    assert sorted(path.name for path in tmp_path.glob("model_*.pt")) == ["model_2.pt", "model_3.pt"]


def test_a_subclass_that_overrides_save_is_called_by_periodic_saving(tmp_path):
    class Saver(OnPolicyRunner):
        seen = []

        def save(self, path, infos=None):
            super().save(path, {"env_state": {"common_step_counter": 11}})
            self.seen.append(path.split("/")[-1])  # a str, as rsl_rl's runners pass it

    cfg = {**model_cfg(), "save_interval": 1, "keep_checkpoints": 2}
    runner = runner_on(cfg, cls=Saver, log_dir=str(tmp_path))
    runner.learn(4)
    assert runner.seen == ["model_1.pt", "model_2.pt", "model_3.pt", "model_4.pt", "model_4.pt", "checkpoint_final.pt"]
    assert sorted(path.name for path in tmp_path.glob("model_*.pt")) == ["model_3.pt", "model_4.pt"]
    assert runner.load(str(tmp_path / "model_3.pt"))["env_state"] == {"common_step_counter": 11}


def test_a_subclass_may_set_the_iteration_it_loaded():
    runner = runner_on(model_cfg())
    runner.current_learning_iteration = 5
    runner.learn(1)
    assert runner.iteration == 6


def test_processes_of_torchrun_are_counted(monkeypatch):
    runner = runner_on(model_cfg())
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert (runner.is_distributed, runner.gpu_global_rank, runner.gpu_local_rank, runner.disable_logs) == (
        True,
        3,
        1,
        True,
    )
