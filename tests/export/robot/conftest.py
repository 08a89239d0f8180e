"""A robot of three joints with two policies, whose bundles are written once."""

import json

import pytest
import torch
from small_robot import INFO, ROBOT, SCENE

from canter.export.bundle import export_bundle
from canter.export.robot.controller import Controller
from canter.export.robot.description import load_robot
from canter.export.runtime import Policy
from canter.modules import ActorCritic, ActorCriticRecurrent
from canter.runners.evaluation import InferencePolicy


def bundle_of(cls, width, actions, folder, **settings):
    torch.manual_seed(width)
    sizes = {"actor_hidden_dims": (8,), "critic_hidden_dims": (4,)}
    policy = cls(width, width, actions, **sizes, **settings).eval()
    bounds = ([-1.0] * actions, [1.0] * actions)
    export_bundle(InferencePolicy(policy, info=INFO, action_bounds=bounds), folder, formats=("onnx", "c"))


@pytest.fixture(scope="session")
def robot_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("robot")
    bundle_of(ActorCritic, 19, 2, folder / "walk")
    bundle_of(ActorCriticRecurrent, 6, 3, folder / "get_up", rnn_type="gru", rnn_hidden_size=4)
    (folder / "robot.json").write_text(json.dumps(ROBOT))
    return folder


@pytest.fixture(scope="session")
def robot(robot_folder):
    return load_robot(robot_folder / "walk", robot_folder / "robot.json")


@pytest.fixture(scope="session")
def policies(robot):
    return {mode.name: Policy(mode.bundle, check=False) for mode in robot.modes[2:]}


@pytest.fixture
def controller(robot, policies):
    return Controller(robot, policies)


@pytest.fixture(scope="session")
def scene(tmp_path_factory):
    """A fixed base with three joints one after the other; `hip` is driven by a motor, the others by nothing."""
    file = tmp_path_factory.mktemp("scene") / "scene.xml"
    file.write_text(SCENE)
    return file
