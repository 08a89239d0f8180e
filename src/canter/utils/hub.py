"""Policies on the Hugging Face Hub: a model is a small run directory, named `hf://USER/NAME`."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from canter.utils.files import StrPath

MAX_DOWNLOAD = 1 << 33  # bytes of one model
_ADDRESS = re.compile(r"hf:/{1,2}(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>.+))?")  # a Path has one slash
_NAMES = re.compile(r"config\.yaml|evaluation\.json|machine\.json|metrics\.jsonl|[\w-]+\.pt")


class HubError(ValueError):
    """The Hub cannot be used; the message says why, and what to do."""


def local_run(path: StrPath) -> Path:
    """The path itself, or the run directory that `hf://USER/NAME` or `hf://USER/NAME@REVISION` was downloaded to."""
    if not str(path).startswith("hf:"):
        return Path(path)
    if (address := _ADDRESS.fullmatch(str(path))) is None:
        raise HubError(f"a model of the Hub is named hf://USER/NAME or hf://USER/NAME@REVISION, not {path}")
    return download(address["repo"], address["revision"])


def download(repo: str, revision: str | None = None) -> Path:
    """The run directory of a model, of which only the files that canter reads are downloaded, once per revision."""
    with _hub(f"download {repo}") as hub:
        api = hub.HfApi()
        info = api.model_info(repo, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings if _NAMES.fullmatch(file.rfilename)}
        if not any(name.endswith(".pt") for name in sizes):
            raise HubError(f"{repo} has no checkpoint of canter, NAME.pt; canter push makes such models")
        if (total := sum(sizes.values())) > MAX_DOWNLOAD:
            raise HubError(f"{repo} has {total} bytes, more than the {MAX_DOWNLOAD} that a model may have")
        # A folder of its own: the Hub's cache is made of links, which no run directory may have.
        folder = Path(hub.constants.HF_HOME) / "canter" / repo.replace("/", "--") / info.sha
        for name in sizes:
            api.hf_hub_download(repo, name, revision=info.sha, local_dir=folder)
    return folder


def upload(folder: Path, repo: str, private: bool = False) -> str:
    """Upload the files of a folder as one commit of a model, which is made if there is none; return its address."""
    with _hub(f"push to {repo}") as hub:
        api = hub.HfApi()
        api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a policy with canter")
        return f"{api.endpoint}/{repo}"


@contextmanager
def _hub(action: str) -> Iterator[Any]:
    """The package of the Hub, whose errors become a `HubError`."""
    try:
        hub = importlib.import_module("huggingface_hub")
        for part in ("constants", "errors"):  # the package imports them when they are asked for by name
            importlib.import_module(f"huggingface_hub.{part}")
    except ImportError as error:
        problem = f"to {action} the package huggingface-hub is needed ({error})"
        raise ImportError(f'{problem}; pip install "canter[hub]"', name="huggingface_hub") from error
    try:
        yield hub
    except (HubError, FileNotFoundError):
        raise
    except hub.errors.HfHubHTTPError as error:
        status = error.response.status_code
        way_out = "; log in with: hf auth login, or set HF_TOKEN" if status in (401, 403, 404) else ""
        raise HubError(f"cannot {action}: {str(error).strip().splitlines()[-1]} (HTTP {status}){way_out}") from error
    except (OSError, ValueError, RuntimeError) as error:  # no connection, no token, a name that cannot be
        raise HubError(f"cannot {action}: {str(error).strip() or type(error).__name__}") from error
