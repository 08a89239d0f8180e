"""The commands for robots, from a bundle to a report."""

import json
import shutil

import pytest
from small_robot import ROBOT

from canter.cli.__main__ import main


@pytest.fixture
def bundle(robot_folder, tmp_path):
    mode = {key: value for key, value in ROBOT["modes"]["walk"].items() if key != "bundle"}
    (tmp_path / "mine.json").write_text(json.dumps(ROBOT | {"modes": {"walk": mode}}))
    return shutil.copytree(robot_folder / "walk", tmp_path / "bundle")


def test_a_bundle_is_driven_and_its_log_is_replayed_plotted_and_compared(bundle, scene, tmp_path, capsys):
    package, loop = tmp_path / "my_robot", tmp_path / "loop"
    flags = ["--robot", tmp_path / "mine.json", "--ros2", package, "--c-loop", loop]
    assert main(["export", str(bundle), *map(str, flags)]) == 0
    assert (package / "bundle/robot.json").is_file()
    assert (loop / "robot_config.c").is_file()

    log = tmp_path / "made.log"
    flags = [
        "--mujoco",
        scene,
        "--fast",
        "--seconds",
        "1.6",
        "--log",
        log,
        "--command",
        0.5,
        0.0,
        "--modes",
        "stand",
        "walk",
    ]
    assert main(["drive", str(bundle), *map(str, flags)]) == 0
    capsys.readouterr()
    assert main(["replay", str(log), str(bundle)]) == 0
    assert "walk: angles" in capsys.readouterr().out

    assert main(["plot", str(log), "--out", str(tmp_path / "log.svg")]) == 0
    assert "knee" in (tmp_path / "log.svg").read_text()

    flags = ["--mujoco", scene, "--out", tmp_path / "gap.html", "--seconds", 0.2, "--seeds", 1, "--command", 0.5, 0.0]
    assert main(["gap", str(bundle), *map(str, flags), "--log", str(log)]) == 0
    assert "fitted simulation" in (tmp_path / "gap.html").read_text()


def test_a_wrong_robot_json_is_refused_before_it_reaches_the_bundle(bundle, tmp_path, capsys):
    (tmp_path / "mine.json").write_text(json.dumps(ROBOT | {"jionts": []}))
    assert main(["export", str(bundle), "--robot", str(tmp_path / "mine.json")]) != 0
    assert "jionts" in capsys.readouterr().err
    assert not (bundle / "robot.json").exists()
