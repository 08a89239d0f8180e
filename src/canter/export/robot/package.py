"""Copies of the control loop that run without canter: in a bundle, and as a ROS 2 package."""

import re
import shutil
from pathlib import Path

from canter.export import runtime
from canter.export.robot.description import load_robot
from canter.export.runtime import Bundle, BundleError

FOLDER = Path(__file__).parent
SOURCES = ("__init__.py", "__main__.py", "controller.py", "description.py", "log.py", "loop.py", "simulated.py")
SOURCES += ("unitree.py", "robot.h", "robot.c")

PACKAGE_XML = """<?xml version="1.0"?>
<package format="3">
  <name>{name}</name>
  <version>0.1.0</version>
  <description>Runs a policy of canter on a robot</description>
  <maintainer email="nobody@example.com">nobody</maintainer>
  <license>Apache-2.0</license>
  <exec_depend>rclpy</exec_depend>
  <exec_depend>sensor_msgs</exec_depend>
  <exec_depend>geometry_msgs</exec_depend>
  <exec_depend>std_msgs</exec_depend>
  <exec_depend>launch</exec_depend>
  <exec_depend>launch_ros</exec_depend>
  <exec_depend>python3-numpy</exec_depend>
  <export><build_type>ament_python</build_type></export>
</package>
"""
SETUP_PY = """from glob import glob

from setuptools import setup

name = "{name}"
setup(
    name=name,
    version="0.1.0",
    packages=[name, name + ".robot"],
    data_files=[
        ("share/ament_index/resource_index/packages", ["resource/" + name]),
        ("share/" + name, ["package.xml"]),
        ("share/" + name + "/launch", glob("launch/*")),
        ("share/" + name + "/config", glob("config/*")),
        ("share/" + name + "/bundle", [f for f in glob("bundle/*") if not f.endswith("/robot")]),
        ("share/" + name + "/bundle/robot", glob("bundle/robot/*.*")),
    ],
    install_requires=["setuptools", "numpy", "onnxruntime"],
    entry_points={{"console_scripts": ["robot = " + name + ".node:main"]}},
)
"""
SETUP_CFG = "[develop]\nscript_dir=$base/lib/{name}\n[install]\ninstall_scripts=$base/lib/{name}\n"
LAUNCH_PY = """from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch_ros.actions import Node


def generate_launch_description():
    share = Path(get_package_share_directory("{name}"))
    bundle = {{"bundle": str(share / "bundle")}}
    parameters = [str(share / "config" / "params.yaml"), bundle]
    return LaunchDescription([Node(package="{name}", executable="robot", output="screen", parameters=parameters)])
"""
PARAMS_YAML = """robot:
  ros__parameters:
    robot: ""          # another robot.json than the one in the bundle
    log: "."           # folder of the logs
    modes: ["stand"]   # entered one after the other when the node starts; then by the topic request
"""
README = """# {name}

Written by canter. Build it in a ROS 2 workspace, and start it:

    pip install onnxruntime
    colcon build --packages-select {name}
    ros2 launch {name} robot.launch.py
    ros2 topic pub -1 /request std_msgs/msg/String "data: walk"

{topics}
The node stamps readings when they arrive; a sensor that stops leads to damp. The program that receives `joint_commands`
must have a watchdog of its own: without a message for some periods it has to brake the joints.
"""


def robot_sources(prefix: str = "") -> dict[str, str]:
    """The files of the control loop by name; `prefix` is the package, with a dot, that stands for `canter.export`."""
    texts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in SOURCES}
    return {name: text.replace("canter.export.", prefix) for name, text in texts.items()}


def write_robot_folder(bundle: Path) -> None:
    """Put the control loop into a bundle, in its folder `robot`: `python -m robot` there runs it without canter."""
    (bundle / "robot").mkdir(exist_ok=True)
    for name, text in robot_sources().items():
        (bundle / "robot" / name).write_text(text, encoding="utf-8")


def write_ros2(bundle: str | Path, folder: str | Path) -> list[Path]:
    """Write a ROS 2 package that runs a bundle; the name of the folder is the name of the package.

    Args:
        bundle: Folder of a bundle with one policy, with its robot.json where it needs one.
        folder: Folder of the package; it must not exist.
    """
    bundle, folder = Path(bundle), Path(folder)
    name = folder.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"the name of a ROS 2 package is lower-case letters, digits and _, got {name!r}")
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose another folder")
    robot = load_robot(Bundle(bundle))
    if len(robot.modes) > 3:
        raise BundleError("a ROS 2 package has one policy; name further bundles in the parameter robot")
    node = (FOLDER / "ros2_node.py").read_text(encoding="utf-8").replace("canter.export.", f"{name}.")
    topics = node[node.index("| topic") : node.index('"""', 3)]
    texts = {
        "package.xml": PACKAGE_XML,
        "setup.py": SETUP_PY,
        "setup.cfg": SETUP_CFG,
        "launch/robot.launch.py": LAUNCH_PY,
        f"resource/{name}": "",
    }
    files = {path: text.format(name=name) for path, text in texts.items()}
    files |= {"config/params.yaml": PARAMS_YAML, "README.md": README.format(name=name, topics=topics)}
    files |= {f"{name}/__init__.py": '"""A policy of canter as a ROS 2 node."""\n', f"{name}/node.py": node}
    files[f"{name}/runtime.py"] = Path(runtime.__file__).read_text(encoding="utf-8")
    files |= {f"{name}/robot/{path}": text for path, text in robot_sources(f"{name}.").items() if path.endswith(".py")}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    shutil.copytree(bundle, folder / "bundle", ignore=shutil.ignore_patterns("__pycache__"))
    return [folder / path for path in files]
