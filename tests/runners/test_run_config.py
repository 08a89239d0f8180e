"""From a training dict or a config object to a plan: nothing misspelt is accepted, nothing given is lost."""

import dataclasses
import warnings

import pytest
import torch
import yaml

from canter.algorithms import PPO, REGISTRY, PPOConfig, register_algorithm
from canter.algorithms.ppo import RunSettings
from canter.compat.spellings import OTHER_SPELLINGS
from canter.envs.torch_envs import CartPole, PointRobot
from canter.modules.actor_critic import ActorCritic
from canter.modules.actors import MLPActor, MLPCritic, MLPSquashedGaussianActor
from canter.modules.q_networks import MLPContinuousQNetwork, MLPQNetwork
from canter.runners import OffPolicyRunner, OnPolicyRunner
from canter.runners.run_config import find_algorithm, make_plan, parse_train_cfg, warn_once

SETTINGS = sorted(f.name for f in dataclasses.fields(PPOConfig))


def typo(name):
    return name[:-1] + "z" if len(name) > 4 else name + "zz"


# ------------------------------------------------------------------ unknown names
@pytest.mark.parametrize("name", SETTINGS)
def test_a_typo_of_any_setting_in_the_config_object_names_it(name):
    with pytest.raises(TypeError, match=f"{typo(name)!r}; did you mean"):
        PPOConfig(**{typo(name): 1})


@pytest.mark.parametrize("name", sorted(f.name for f in dataclasses.fields(RunSettings)))
@pytest.mark.parametrize("section", ["top", "runner"])
def test_a_typo_at_the_top_of_either_layout_names_the_setting(tiny, name, section):
    cfg = tiny()
    cfg |= {typo(name): 1} if section == "top" else {"runner": {typo(name): 1}}
    with pytest.raises(TypeError, match=f"{typo(name)!r}; did you mean"):
        parse_train_cfg(cfg)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"policy": {"actor_hiden_dims": [8]}}, "'actor_hidden_dims'"),
        ({"policy": {"class_name": "ActorCriticRecurrent", "rnn_typ": "gru"}}, r"'rnn_type'"),
        ({"algorithm": {"rnd_cfg": {"wieght": 1.0}}}, r"'weight'"),
        ({"storage": {"num_env": 3}}, "num_env"),
        ({"obs_groups": {"policy": ["nope"]}}, "nope"),
    ],
)
def test_a_typo_deeper_down_is_an_error_too(make_runner, section, message):
    class Groups:  # an rsl_rl 3.x environment
        num_envs, num_actions, device = 2, 1, "cpu"

        def get_observations(self):
            return {"policy": torch.zeros(2, 3)}

        def step(self, actions):
            return self.get_observations(), torch.zeros(2), torch.zeros(2), {}

    with pytest.raises((TypeError, KeyError), match=message):
        make_runner(Groups() if "obs_groups" in section else None, **section)


@pytest.mark.parametrize("layout", ["object", "top"])
@pytest.mark.parametrize("theirs", ["num_steps"])
def test_another_librarys_spelling_of_a_run_setting_is_answered_with_ours(tiny, layout, theirs):
    with pytest.raises(TypeError, match="'num_steps_per_env'"):
        PPOConfig(**{theirs: 1}) if layout == "object" else parse_train_cfg(tiny(**{theirs: 1}))


@pytest.mark.parametrize(
    ("theirs", "ours", "layout"),
    [
        (*names, layout)
        for names in sorted(OTHER_SPELLINGS.items() - {("num_steps", "num_steps_per_env")})
        for layout in ("object", "algorithm", "top", "keyword")
        if (layout, names[0]) != ("algorithm", "optimizer")  # rsl_rl's name, which a training dict may use
    ],
)
def test_the_spelling_of_another_library_is_answered_with_ours(tiny, layout, theirs, ours):
    attempts = {
        "object": lambda: PPOConfig(**{theirs: 1}),
        "keyword": lambda: PPO(None, **{theirs: 1}),
        "top": lambda: parse_train_cfg(tiny(**{theirs: 1})),
        "algorithm": lambda: parse_train_cfg(tiny(algorithm={theirs: 1})),
    }
    with pytest.raises(TypeError, match=f"'{ours}'"):
        attempts[layout]()


@pytest.mark.parametrize(
    ("section", "theirs", "ours"),
    [
        ("top", "n_steps", "num_steps_per_env"),
        ("algorithm", "n_epochs", "num_learning_epochs"),
        ("algorithm", "lr", "learning_rate"),
        ("policy", "net_arch", "actor_hidden_dims"),
    ],
)
def test_a_short_form_in_a_training_dict_is_answered_with_the_setting(make_runner, section, theirs, ours):
    given = {theirs: 1} if section == "top" else {section: {theirs: 1}}
    with pytest.raises(TypeError, match=f"'{ours}'"):
        make_runner(None, **given)


@pytest.mark.parametrize("section", ["policy", "algorithm"])
def test_a_section_that_is_no_dict_is_refused_by_name(section):
    with pytest.raises(TypeError, match=f"{section} must be a dict of settings.*got 'MlpPolicy'"):
        parse_train_cfg({"num_steps_per_env": 4, section: "MlpPolicy"})


# ------------------------------------------------------------------ unknown classes
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"algorithm": {"class_name": "PPPO"}}, r"'ppo'"),
        ({"policy": {"class_name": "ActorCritc"}}, r"'ActorCritic'"),
        ({"policy": {"class_name": "ActorCriticRecurrent", "rnn_type": "grru"}}, r"one of lstm, gru, got 'grru'"),
        ({"policy": {"activation": "eluu"}}, r"'eluu'"),
        ({"algorithm": {"optimizer_class_name": "Adamm"}}, r"'adam'"),
        ({"algorithm": {"schedule": "cosine"}}, r"schedule must be one of .*adaptive.*, got 'cosine'"),
        ({"callback_errors": "ignore"}, r"callback_errors must be one of raise, warn, got 'ignore'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(make_runner, section, message):
    with pytest.raises((ValueError, KeyError), match=message):
        make_runner(**section)


def test_unknown_algorithms_are_listed_and_new_ones_can_be_registered():
    with pytest.raises(ValueError, match=r"'zzz'.* ppo"):
        OnPolicyRunner(PointRobot(2), algorithm="zzz", actor_class=MLPActor, critic_class=MLPCritic)

    class Mine(PPO):
        pass

    try:
        register_algorithm("Mine", Mine, PPOConfig)
        runner = OnPolicyRunner(
            PointRobot(2),
            algorithm="mine",
            actor_class=MLPActor,
            critic_class=MLPCritic,
            cfg=PPOConfig(num_steps_per_env=4),
            show_progress=False,
        )
        runner.learn(1)
        assert type(runner.alg) is Mine
        assert find_algorithm("MINE") == "mine"
    finally:
        REGISTRY.pop("mine", None)


@pytest.mark.parametrize("absent", ["actor_class", "critic_class"])
def test_a_missing_network_class_is_named(absent):
    classes = {"actor_class": MLPActor, "critic_class": MLPCritic}
    with pytest.raises(ValueError, match=rf"needs {absent} \(such as canter.modules.MLP\w+\) or agent; a training"):
        OnPolicyRunner(PointRobot(2), algorithm="ppo", **{k: v for k, v in classes.items() if k != absent})


# ------------------------------------------------------------------ values
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps_per_env", 0),
        ("log_interval", -1),
        ("keep_checkpoints", 1),
        ("eval_interval", -1),
        ("eval_episodes", 0),
        ("max_iterations", -3),
    ],
)
def test_an_impossible_number_is_refused_before_the_run(make_runner, name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least .*{value!r}"):
        make_runner(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_learning_epochs", 0),
        ("clip_param", -0.2),
        ("gamma", 1.01),
        ("gamma", float("nan")),
        ("lam", -0.1),
        ("learning_rate", -1e-3),
        ("max_grad_norm", float("nan")),
    ],
)
def test_a_number_that_cannot_be_learned_with_is_refused(make_runner, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a .*number .*got"):
        make_runner(algorithm={name: value})
    with pytest.raises(ValueError, match=f"{name} must be a .*number .*got"):
        PPO(ActorCritic(6, 9, 2), **{name: value})


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_named(tiny, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=rf"'{device}'.*cpu"):
        OnPolicyRunner(PointRobot(2), tiny(), device=device)


# ------------------------------------------------------------------ nothing is lost
def test_the_plan_survives_yaml(make_runner):
    runner = make_runner(
        algorithm={"rnd_cfg": {"weight": 0.5}, "clip_min_std": (0.1, 0.2)},
        extra_log_keys=["log"],
        logger="tensorboard",
        run_info={"task": "X"},
    )
    config = yaml.safe_load(yaml.safe_dump(runner.config()))
    again = parse_train_cfg(config)
    assert again.to_dict() == runner.plan.to_dict()
    assert (again.cfg.extra_log_keys, again.cfg.rnd_cfg["weight"]) == (("log",), 0.5)
    rebuilt = OnPolicyRunner(PointRobot(4), config, show_progress=False)
    rebuilt.learn(1)
    assert rebuilt.config()["algorithm"] == runner.config()["algorithm"]


def test_networks_given_by_class_are_named_in_the_plan_and_found_again():
    cfg = PPOConfig(num_steps_per_env=4)
    networks = {"actor_class": MLPActor, "critic_class": MLPCritic, "actor_cfg": {"hidden_dims": [8]}}
    plan = make_plan(None, cfg, "ppo", None, networks)
    config = yaml.safe_load(yaml.safe_dump(plan.to_dict()))
    assert config["policy"]["actor_class"] == "MLPActor"
    runner = OnPolicyRunner(PointRobot(2), config, show_progress=False)
    assert isinstance(runner.policy.actor, MLPActor)
    config["policy"]["actor_class"] = "MLPActr"
    with pytest.raises(ValueError, match=r"'MLPActor'"):
        parse_train_cfg(config)


def test_projects_of_loggers_become_their_settings():
    cfg = parse_train_cfg({"logger": "wandb", "wandb_project": "legs", "neptune_project": None}).cfg
    assert cfg.logger_backend == "wandb"
    assert cfg.logger_kwargs == {"wandb": {"project": "legs"}}


def test_a_dict_that_leaves_out_epochs_minibatches_or_schedule_is_told_its_defaults_once(tiny):
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="leaves out settings of PPO: using schedule='fixed'"):
        parse_train_cfg(tiny(algorithm={"num_learning_epochs": 2}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        parse_train_cfg(tiny(algorithm={"num_learning_epochs": 2}))
        parse_train_cfg(tiny(algorithm={"num_learning_epochs": 2, "num_mini_batches": 1, "schedule": "fixed"}))


# ------------------------------------------------------------------ networks given beside a training dict
class OwnQ(MLPQNetwork):
    pass


class OwnActor(MLPSquashedGaussianActor):
    pass


class OwnCritic(MLPContinuousQNetwork):
    pass


class OwnPPOActor(MLPActor):
    pass


class OwnPPOCritic(MLPCritic):
    pass


OFF_POLICY = {"device": "cpu", "seed": 1, "algorithm": {"class_name": "DQN", "buffer_size": 400}}


def test_networks_given_beside_an_off_policy_training_dict_are_used():
    networks = {"q_network_class": OwnQ, "q_network_cfg": {"hidden_dims": (5,)}}
    runner = OffPolicyRunner(CartPole(2), OFF_POLICY, **networks, show_progress=False)
    assert type(runner.alg.q_network) is OwnQ
    assert runner.alg.q_network.cfg["hidden_dims"] == (5,)
    sac = {**OFF_POLICY, "algorithm": {"class_name": "SAC", "buffer_size": 400}}
    sac["policy"] = {"actor_cfg": {"init_std": 0.3}}
    networks = {"actor_class": OwnActor, "critic_class": OwnCritic, "critic_cfg": {"hidden_dims": (4,)}}
    runner = OffPolicyRunner(PointRobot(2), sac, **networks, show_progress=False)
    assert type(runner.alg.actor) is OwnActor
    assert runner.alg.actor.cfg["init_std"] == 0.3
    assert {type(part) for part in runner.alg.critics.modules()} >= {OwnCritic}
    assert runner.config()["policy"]["critic_class"] == "OwnCritic"


def test_networks_given_beside_an_on_policy_training_dict_are_used(tiny):
    cfg = tiny()
    del cfg["policy"]
    networks = {"actor_class": OwnPPOActor, "critic_class": OwnPPOCritic, "actor_cfg": {"hidden_dims": (5,)}}
    runner = OnPolicyRunner(PointRobot(2), cfg, **networks, show_progress=False)
    assert (type(runner.policy.actor), type(runner.policy.critic)) == (OwnPPOActor, OwnPPOCritic)
    assert runner.policy.actor.cfg["hidden_dims"] == (5,)


def test_networks_that_contradict_a_training_dict_are_refused(tiny):
    with pytest.raises(ValueError, match="policy class 'ActorCritic' .* and actor_class as an argument are two"):
        OnPolicyRunner(PointRobot(2), tiny(), actor_class=OwnPPOActor, critic_class=OwnPPOCritic)
    cfg = tiny()
    del cfg["policy"]
    with pytest.raises(ValueError, match="OnPolicyRunner needs critic_class"):
        OnPolicyRunner(PointRobot(2), cfg, actor_class=OwnPPOActor)
    dqn = {**OFF_POLICY, "policy": {"q_network_class": "MLPQNetwork"}}
    with pytest.raises(ValueError, match="q_network_class is .*MLPQNetwork.* and .*OwnQ.* as an argument; give one"):
        OffPolicyRunner(CartPole(2), dqn, q_network_class=OwnQ)
    OffPolicyRunner(CartPole(2), dqn, q_network_class=MLPQNetwork)  # the same
    with pytest.raises(TypeError, match="actor_class"):
        OffPolicyRunner(CartPole(2), OFF_POLICY, actor_class=OwnActor)
    runner = OffPolicyRunner(CartPole(2), OFF_POLICY)
    with pytest.raises(ValueError, match="the agent has its networks; leave out q_network_class"):
        OffPolicyRunner(CartPole(2), agent=runner.alg, q_network_class=OwnQ)


def test_an_algorithm_named_beside_a_training_dict_is_used_or_refused():
    unnamed = {"device": "cpu", "algorithm": {"buffer_size": 400}}
    assert OffPolicyRunner(PointRobot(2), unnamed, "td3").plan.algorithm == "TD3"
    assert OffPolicyRunner(CartPole(2), unnamed).plan.algorithm == "DQN"
    with pytest.raises(ValueError, match="the training dict is of 'DQN', the argument algorithm is 'sac'"):
        OffPolicyRunner(PointRobot(2), OFF_POLICY, "sac")


# ------------------------------------------------------------------ the wrong kind of runner or argument
@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
@pytest.mark.parametrize("form", ["dict", "config", "name"])
def test_an_off_policy_algorithm_in_an_on_policy_runner_is_answered_with_the_right_runner(name, form):
    given = {"dict": {"algorithm": {"class_name": name}}, "config": REGISTRY[name].config_class(), "name": None}[form]
    with pytest.raises(ValueError, match=f"{name.upper()} learns from a replay buffer; use OffPolicyRunner instead"):
        OnPolicyRunner(CartPole(2, device="cpu"), given, algorithm=name if form == "name" else None)


def test_an_on_policy_algorithm_in_an_off_policy_runner_is_answered_with_the_right_runner(make_runner):
    for given in ({"algorithm": {"class_name": "PPO"}}, PPOConfig(), make_runner().alg):
        with pytest.raises(ValueError, match="PPO learns from rollouts; use OnPolicyRunner instead of OffPolicyRunner"):
            OffPolicyRunner(CartPole(2, device="cpu"), given)


@pytest.mark.parametrize("runner_class", [OnPolicyRunner, OffPolicyRunner])
@pytest.mark.parametrize("given", ["MlpPolicy", 3, ["PPO"], PPOConfig])
def test_what_is_neither_a_dict_nor_a_config_object_is_refused(runner_class, given):
    with pytest.raises(TypeError, match="a runner needs a training dict such as .* or a config object such as PPOCon"):
        runner_class(CartPole(2, device="cpu"), given)
    with pytest.raises(TypeError, match="a runner needs a training dict"):
        runner_class(CartPole(2, device="cpu"), cfg=given)
