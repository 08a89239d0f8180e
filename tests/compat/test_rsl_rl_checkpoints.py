"""Checkpoints that rsl_rl's own runners wrote, 2.x to 5.x: the same actions and values, and training goes on."""

import sys
from pathlib import Path

import pytest
import torch

from canter.compat.checkpoints import import_state
from canter.runners import OnPolicyRunner

pytest.importorskip("tensordict")
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent / "rsl_rl"))
from peer import PeerEnv, model_cfg

FILES = sorted((Path(__file__).parent / "rsl_rl").glob("*.pt"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def read(file):
    return torch.load(file, weights_only=True)


def runner_for(infos, **more):
    torch.manual_seed(5)
    env = PeerEnv(int(infos["version"][0]))
    return OnPolicyRunner(env, {**infos["cfg"], **more}, device="cpu", show_progress=False)


def test_there_are_files_of_every_layout():
    assert {file.stem[7] for file in FILES} == {"2", "3", "4", "5"}


@every_file
def test_actions_and_values_are_those_of_rsl_rl(file):
    infos = read(file)["infos"]
    runner = runner_for(infos)
    assert runner.load(str(file))["version"] == infos["version"]
    assert runner.current_learning_iteration == 1
    act = runner.get_inference_policy(device="cpu")
    for step, obs in enumerate(infos["obs"]):
        if step == 2:
            runner.alg.policy.reset(infos["dones"])
        is_vector = infos["version"].startswith("2")
        actions = act(torch.cat([obs["proprio"], obs["command"]], 1) if is_vector else TensorDict(obs, batch_size=[4]))
        torch.testing.assert_close(actions, infos["actions"][step], rtol=0, atol=1e-6)
        values = runner.policy.evaluate(obs["critic"])
        torch.testing.assert_close(values, infos["values"][step], rtol=0, atol=1e-6)


@every_file
def test_every_moment_of_the_optimizer_belongs_to_the_parameter_it_was_saved_for(file):
    state = read(file)
    parts = [state[name] for name in ("model_state_dict", "actor_state_dict", "critic_state_dict") if name in state]
    weights = [value for part in parts for name, value in part.items() if "normalizer" not in name]
    runner = runner_for(state["infos"])
    runner.load(file)
    ours = runner.alg.optimizer.state_dict()["state"]
    found = 0
    for index, parameter in enumerate(runner.policy.parameters()):
        [place] = [i for i, weight in enumerate(weights) if torch.equal(weight, parameter)]
        theirs = state["optimizer_state_dict"]["state"][place]
        torch.testing.assert_close(ours[index]["exp_avg_sq"], theirs["exp_avg_sq"])
        found += 1
    assert found == len(weights) == len(ours)


@every_file
def test_training_goes_on(file):
    runner = runner_for(read(file)["infos"])
    runner.load(file)
    before = {name: p.detach().clone() for name, p in runner.policy.named_parameters()}
    runner.learn(1)
    assert runner.current_learning_iteration == 2
    assert all(not torch.equal(p, before[name]) for name, p in runner.policy.named_parameters())


def test_load_cfg_selects_the_actor_alone():
    file = Path(__file__).parent / "rsl_rl" / "rsl_rl_5_lstm_normalized.pt"
    runner = runner_for(read(file)["infos"])
    before = {name: value.clone() for name, value in runner.policy.state_dict().items()}
    runner.load(str(file), load_cfg={"actor": True}, strict=True, map_location="cpu")
    assert runner.current_learning_iteration == 0
    after = runner.policy.state_dict()
    changed = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"log_std", "actor", "memory_a", "obs_normalizer"}
    assert runner.alg.optimizer.state_dict()["state"] == {}
    runner.load(str(file), {"critic": True, "iteration": True})  # rsl_rl's positional order
    assert runner.current_learning_iteration == 1
    torch.testing.assert_close(runner.policy.state_dict(), import_state(read(file))["model_state_dict"])


def test_arguments_by_position_are_those_of_rsl_rl(tmp_path):
    file = Path(__file__).parent / "rsl_rl" / "rsl_rl_5_mlp.pt"
    state = read(file)
    del state["actor_state_dict"]["mlp.2.bias"]
    torch.save(state, tmp_path / "changed.pt")
    runner = runner_for(state["infos"])
    runner.load(str(file), None, True, "cpu")  # 5.x: load_cfg, strict, map_location
    runner.load(str(file), True, "cpu")  # 3.x: load_optimizer, map_location
    runner.load(str(tmp_path / "changed.pt"), {"actor": True}, False, "cpu")
    with pytest.raises(RuntimeError, match=r"missing actor.2.bias"):
        runner.load(str(tmp_path / "changed.pt"), {"actor": True}, True)
    with pytest.raises(TypeError, match="'more' is one too many"):
        runner.load(str(file), None, True, "cpu", "more")


def test_a_part_that_no_checkpoint_has_is_an_error(tmp_path):
    file = Path(__file__).parent / "rsl_rl" / "rsl_rl_5_mlp.pt"
    runner = runner_for(read(file)["infos"])
    before = {name: value.clone() for name, value in runner.policy.state_dict().items()}
    for wrong in ({"load_cfg": {"acotr": True}}, {"load_optimizer": {"acotr": True}}):
        with pytest.raises(ValueError, match="load_cfg has no part 'acotr'; parts of a checkpoint are actor, critic"):
            runner.load(file, **wrong)
    torch.testing.assert_close(runner.policy.state_dict(), before)


def test_without_strict_a_tensor_that_one_side_lacks_keeps_its_value(tmp_path):
    file = Path(__file__).parent / "rsl_rl" / "rsl_rl_5_mlp.pt"
    state = read(file)
    state["actor_state_dict"]["extra.weight"] = state["actor_state_dict"].pop("mlp.2.bias")
    torch.save(state, tmp_path / "changed.pt")
    runner = runner_for(state["infos"])
    own = runner.policy.actor[2].bias.detach().clone()
    with pytest.raises(RuntimeError, match=r"missing actor.2.bias, want \(2,\)"):
        runner.load(tmp_path / "changed.pt")
    runner.load(tmp_path / "changed.pt", strict=False, load_optimizer=False)
    torch.testing.assert_close(runner.policy.actor[2].bias.detach(), own)
    torch.testing.assert_close(runner.policy.actor[0].weight.detach(), state["actor_state_dict"]["mlp.0.weight"])


def test_a_normaliser_that_only_one_side_has_is_an_error_that_names_the_setting():
    file = Path(__file__).parent / "rsl_rl" / "rsl_rl_5_mlp_normalized.pt"
    runner = OnPolicyRunner(PeerEnv(), model_cfg(normalized=(True, True)), device="cpu", show_progress=False)
    with pytest.raises(ValueError, match="lacks statistics for critic_obs_normalizer.*critic_obs_normalization=False"):
        runner.load(file)


def test_a_checkpoint_of_rsl_rl_is_a_teacher():
    file = Path(__file__).parent / "rsl_rl" / "rsl_rl_5_mlp_normalized.pt"
    infos = read(file)["infos"]
    teacher = {"actor_hidden_dims": [6], "critic_hidden_dims": [5], "noise_std_type": "log"}
    algorithm = {"class_name": "TPPO", "using_ppo": False, "teacher_ac_path": str(file), "teacher_policy": teacher}
    cfg = {"obs_groups": {"actor": ["command"], "critic": ["proprio", "command"]}, "algorithm": algorithm}
    runner = OnPolicyRunner(PeerEnv(), cfg, device="cpu", show_progress=False)
    for obs, actions in zip(infos["obs"], infos["actions"], strict=True):
        seen = torch.cat([obs["proprio"], obs["command"]], 1)
        torch.testing.assert_close(runner.alg.teacher_actor_critic.act_inference(seen), actions, rtol=0, atol=1e-6)
    runner.learn(1)


def test_rnd_of_rsl_rl_goes_on(tmp_path):
    state = read(Path(__file__).parent / "rsl_rl" / "rsl_rl_5_mlp.pt")
    cfg = state["infos"]["cfg"]
    cfg["algorithm"]["rnd_cfg"] = {"weight": 1.0, "num_outputs": 2, "predictor_hidden_dims": [3]}
    cfg["algorithm"]["rnd_cfg"] |= {
        "target_hidden_dims": [3],
        "state_normalization": True,
        "reward_normalization": True,
    }
    cfg["obs_groups"]["rnd_state"] = ["critic"]
    nets = {"0.weight": torch.randn(3, 4), "0.bias": torch.randn(3), "2.weight": torch.randn(2, 3)}
    nets["2.bias"] = torch.randn(2)
    rnd = {f"{net}.{name}": torch.randn_like(value) for net in ("predictor", "target") for name, value in nets.items()}
    statistics = {"_mean": torch.randn(1, 4), "_var": torch.full((1, 4), 4.0), "_std": torch.full((1, 4), 2.0)}
    rnd |= {f"state_normalizer.{name}": value for name, value in statistics.items()}
    scale = {"_mean": torch.tensor([3.0]), "_var": torch.tensor([9.0]), "_std": torch.tensor([3.0])}
    rnd |= {f"reward_normalizer.emp_norm.{name}": value for name, value in scale.items()}
    rnd |= {name: torch.tensor(50) for name in ("state_normalizer.count", "reward_normalizer.emp_norm.count")}
    moments = {i: {"step": torch.tensor(7.0), "exp_avg": v, "exp_avg_sq": v.abs()} for i, v in enumerate(nets.values())}
    group = {**state["optimizer_state_dict"]["param_groups"][0], "params": [0, 1, 2, 3]}
    state |= {"rnd_state_dict": rnd, "rnd_optimizer_state_dict": {"state": moments, "param_groups": [group]}}
    torch.save(state, tmp_path / "model.pt")
    runner = OnPolicyRunner(PeerEnv(), cfg, device="cpu", show_progress=False)
    runner.load(tmp_path / "model.pt")
    model = runner.alg.extensions["rnd"].model
    loaded = model.state_dict()
    for name, value in rnd.items():
        if "reward" not in name:
            torch.testing.assert_close(loaded[name], value)
    assert (float(model.reward_scaler.mean), float(model.reward_scaler.var), int(model.reward_scaler.count)) == (
        3,
        9,
        50,
    )
    saved = model.optimizer.state_dict()["state"]
    torch.testing.assert_close(saved[2]["exp_avg"].reshape(2, 3), nets["2.weight"])
    runner.learn(1)
