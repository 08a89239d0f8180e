"""`canter push` and `hf://` against a stand-in of the Hub's HTTP interface on loopback."""

import base64
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import yaml

import canter
from canter.cli.__main__ import main
from canter.utils.checkpoint import load_checkpoint, save_checkpoint
from canter.utils.hub import HubError

constants = pytest.importorskip("huggingface_hub.constants")
SHA = "0123456789" * 4


class StandIn(BaseHTTPRequestHandler):
    """Models as dicts of files; a write needs the token `secret`."""

    def log_message(self, *args):
        pass

    def answer(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, models = urlsplit(self.path).path, self.server.models
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self.answer({"url": f"{self.server.url}/me/walker"})
        _, _, _, user, name, action, _ = path.split("/")
        if action == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.answer({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files = models.setdefault(f"{user}/{name}", {})
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self.answer({"commitUrl": f"{self.server.url}/{user}/{name}/commit/{SHA}", "commitOid": SHA})

    def do_GET(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        is_info = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_info else parts[:2])
        files = self.server.models.get(repo)
        if files is None:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        if is_info:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            return self.answer({"id": repo, "modelId": repo, "sha": SHA, "siblings": siblings})
        self.server.fetched.append(parts[-1])
        content = files["/".join(parts[4:])]
        return self.answer(content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=SHA)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def server(monkeypatch, tmp_path):
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    httpd.url = f"http://127.0.0.1:{httpd.server_port}"
    httpd.models, httpd.created, httpd.fetched = {}, [], []
    Thread(target=httpd.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", httpd.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", httpd.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def add_secrets(run):
    secret = {"logger_backend": "wandb", "logger_kwargs": {"wandb": {"entity": "private-team", "api_key": "key-1"}}}
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | secret))
    state = load_checkpoint(run / "checkpoint_final.pt")
    save_checkpoint(run / "checkpoint_final.pt", state | {"config": state["config"] | secret})


def test_a_run_that_is_pushed_is_loaded_and_evaluated_by_its_name(trained, server, capsys, tmp_path):
    add_secrets(trained)
    (trained / "video.mp4").write_bytes(b"film")
    (trained / "git.diff").write_text("secret diff")
    step = load_checkpoint(trained / "checkpoint_final.pt")["total_timesteps"]
    score = {"eval/mean_reward": 31.25, "eval/std_reward": 4.0, "episodes": 20, "step": step}
    (trained / "evaluation.json").write_text(json.dumps(score))
    assert main(["push", str(trained), "me/walker", "--private"]) == 0
    assert f"{server.url}/me/walker" in capsys.readouterr().out
    assert server.created[0]["name"] == "walker"
    assert "private" in server.created[0].values()  # its visibility
    files = server.models["me/walker"]
    assert {"checkpoint_final.pt", "config.yaml", "evaluation.json", "replay.mp4", "README.md"} <= set(files)
    assert "git.diff" not in files
    whole = b"".join(files.values())
    assert b"private-team" not in whole
    assert b"key-1" not in whole
    _, head, page = files["README.md"].decode().split("---\n", 2)
    result = yaml.safe_load(head)["model-index"][0]["results"][0]
    assert result["metrics"][0]["value"] == "31.2 ± 4.0"
    assert "replay.mp4" in page
    assert 'canter.load("hf://me/walker")' in page
    small, own = canter.load("hf://me/walker"), canter.load(trained)
    assert "optimizer_state_dict" not in load_checkpoint(small.info["checkpoint"])
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    assert np.array_equal(small.predict(obs)[0], own.predict(obs)[0])
    fetched = server.fetched.count("checkpoint_final.pt")
    assert main(["eval", "hf://me/walker", "--episodes", "2"]) == 0
    assert server.fetched.count("checkpoint_final.pt") <= fetched + 1  # the body is not fetched again
    assert not any(path.is_symlink() for path in (tmp_path / "hf").rglob("*"))


def test_a_policy_that_was_never_evaluated_is_published_without_a_score(trained, server):
    (trained / "evaluation.json").unlink(missing_ok=True)
    (trained / "best.json").unlink(missing_ok=True)
    assert main(["push", str(trained), "me/walker"]) == 0
    page = server.models["me/walker"]["README.md"].decode()
    assert "model-index" not in page
    assert "not evaluated" in page


def test_what_a_stranger_published_is_read_as_a_strangers_run(trained, server, tmp_path, capsys):
    config = yaml.safe_load((trained / "config.yaml").read_text())
    config["run"]["task"] = "evil_module:Task-v0"
    server.models["them/trap"] = {
        "config.yaml": yaml.safe_dump(config).encode(),
        "checkpoint_final.pt": b"cos\nsystem\n(S'touch owned'\ntR.",
        "../outside.pt": b"x",
        "folder/inside.pt": b"x",
        "setup.py": b"x",
    }
    assert main(["eval", "hf://them/trap"]) == 2
    assert "evil_module" in capsys.readouterr().err
    with pytest.raises(Exception, match="checkpoint_final.pt"):
        canter.load("hf://them/trap")
    assert set(server.fetched) == {"config.yaml", "checkpoint_final.pt"}
    assert not list(tmp_path.rglob("outside.pt"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("hf://me/nothing", "HTTP 404.*hf auth login"), ("hf://me", "hf://USER/NAME"), ("hf://me/empty", "no checkpoint")],
)
def test_a_model_that_cannot_be_loaded_is_named(server, name, says):
    server.models["me/empty"] = {"README.md": b"nothing"}
    with pytest.raises(HubError, match=says):
        canter.load(name)


def test_a_push_without_a_token_says_how_to_log_in(trained, server, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert main(["push", str(trained), "me/walker"]) == 2
    assert "hf auth login" in capsys.readouterr().err


def test_a_model_that_is_too_large_is_refused_before_it_is_downloaded(server, monkeypatch):
    server.models["them/large"] = {"checkpoint_final.pt": b"x" * 100}
    monkeypatch.setattr("canter.utils.hub.MAX_DOWNLOAD", 99)
    with pytest.raises(HubError, match="100 bytes"):
        canter.load("hf://them/large")
    assert server.fetched == []


def test_without_the_extra_both_ways_name_the_command_that_installs_it(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "canter\[hub\]"'):
        canter.load("hf://me/walker")
    assert main(["push", str(trained), "me/walker"]) == 2
    assert 'pip install "canter[hub]"' in capsys.readouterr().err
