"""The runner for mjlab's own train and play scripts."""

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

from canter.envs.mjlab import is_mjlab
from canter.runners.on_policy_runner import OnPolicyRunner


class MjlabRunner(OnPolicyRunner):
    """Trains in place of mjlab's runners and, like them, writes `<run>.onnx` with mjlab's metadata at every save.

    For a tracking task the file also holds the motion, as mjlab's own exporter writes it.

    Args:
        registry_name: W&B artifact of the motion, which a W&B run is linked to.
    """

    env: Any

    def __init__(self, *args: Any, registry_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.registry_name = registry_name
        if not is_mjlab(self.env):
            kind = type(getattr(self.env, "unwrapped", self.env)).__name__
            raise TypeError(f"MjlabRunner trains environments of mjlab, not a {kind}; use OnPolicyRunner")
        commands = self.env.unwrapped.command_manager
        self.motion: Any = commands.get_term("motion") if "motion" in commands.active_terms else None
        """The motion command of a tracking task."""

    def export_policy_to_onnx(self, path: str | Path, filename: str = "policy.onnx", verbose: bool = False) -> None:
        """Write the policy as an ONNX file that was compared with it; with the motion of a tracking task."""
        from canter.compat.exporters import write_onnx, write_onnx_with_motion  # the exporters load slowly

        write = write_onnx if self.motion is None else write_onnx_with_motion
        write(self, Path(path) / filename)

    def save(self, path: str | Path | None = None, infos: Any = None) -> None:
        """Write a checkpoint and the ONNX file beside it; training continues if the file cannot be written."""
        checkpoint = self.checkpoints.numbered() if path is None else Path(path)
        super().save(checkpoint, infos)
        folder, run = checkpoint.parent, getattr(sys.modules.get("wandb"), "run", None)
        file = folder / f"{folder.name}.onnx"
        try:
            self.export_policy_to_onnx(folder, file.name)
        except Exception as error:
            warnings.warn(f"{file} was not written: {error!r}; training continues", stacklevel=2)
            return
        try:
            exporter = importlib.import_module("mjlab.rl.exporter_utils")
            metadata = exporter.get_base_metadata(self.env.unwrapped, "local" if run is None else run.name)
            if self.motion is not None:
                metadata |= {"anchor_body_name": self.motion.cfg.anchor_body_name}
                metadata |= {"body_names": list(self.motion.cfg.body_names)}
            exporter.attach_metadata_to_onnx(str(file), metadata)
        except Exception as error:  # such as a scene without an entity "robot", whose joints mjlab describes
            warnings.warn(f"{file} has no metadata of mjlab: {error!r}; training continues", stacklevel=2)
        try:
            if self.writer is not None and self.cfg.upload_model:
                self.writer.save_file(file)
            if run is not None and self.registry_name is not None:
                run.use_artifact(self.registry_name)
                self.registry_name = None
        except Exception as error:
            warnings.warn(f"{file} was not uploaded: {error!r}; training continues", stacklevel=2)
