"""The comparison of groups of runs, and its page in an HTML parser and in a browser."""

import base64
import json
import os
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from test_run_data import make_run

from canter.cli.__main__ import main
from canter.utils.report import Comparison, duration, write_report
from canter.utils.run_data import load_run
from canter.utils.statistics import improvement, iqm_estimate

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8cfc0000003010100"
    "18dd8db00000000049454e44ae426082"
)


@pytest.fixture
def groups(tmp_path):
    """Two groups of five seeds; `fast` learns in half the steps."""
    made = {"slow & steady": [], "fast": []}
    for seed in range(5):
        slow = make_run(tmp_path / f"slow-seed{seed}", seed, 1e-3, values=(0.0, 2.0, 4.0, 6.0 + seed), final=6.0 + seed)
        fast = make_run(tmp_path / f"fast-seed{seed}", seed, 1e-2, values=(0.0, 8.0, 8.0, 8.0 + seed), final=8.0 + seed)
        made["slow & steady"].append(load_run(slow))
        made["fast"].append(load_run(fast))
    (tmp_path / "fast-seed4" / "view.png").write_bytes(PIXEL)
    return made


def test_the_numbers_are_those_of_the_statistics(groups):
    numbers = Comparison(groups).to_dict()
    fast = numbers["groups"]["fast"]
    assert fast["iqm"]["value"] == 10.0  # the mean of 9, 10, 11
    scores = {"slow & steady": np.arange(6.0, 11.0), "fast": np.arange(8.0, 13.0)}
    for label, array in scores.items():
        assert tuple(numbers["groups"][label]["iqm"].values()) == iqm_estimate([array])
    over = {(row["of"], row["over"]): row["value"] for row in numbers["improvement"]}
    assert over["fast", "slow & steady"] == pytest.approx((5 + 5 + 5 * 3 - 3 - 3 + 3 * 0.5) / 25)
    assert sum(over.values()) == pytest.approx(1.0)
    assert over["fast", "slow & steady"] == improvement([scores["fast"]], [scores["slow & steady"]]).value
    assert fast["steps_per_second"] == pytest.approx(400 / 35)
    assert [run["seed"] for run in fast["runs"]] == [0, 1, 2, 3, 4]
    assert fast["curves"]["Pendulum-v1"]["value"] == [0.0, 8.0, 8.0, 10.0]
    assert numbers["score_ranges"] is None


def test_sample_efficiency_is_where_the_iqm_first_reaches_a_share_of_the_way(groups):
    rows = Comparison(groups).to_dict()["sample_efficiency"]
    by_group = {row["group"]: row for row in rows if row["target"] == 7.5}  # 75% of the way from 0 to 10
    assert (by_group["fast"]["steps"], by_group["fast"]["seconds"]) == (200, 15.0)
    assert (by_group["slow & steady"]["steps"], by_group["slow & steady"]["seconds"]) == (400, 35.0)
    assert [row["steps"] for row in rows if row["target"] == 9.0] == [None, 400]


def test_several_tasks_are_scaled_to_their_own_range(groups, tmp_path):
    for label, low in (("slow & steady", 100.0), ("fast", 300.0)):
        runs = [make_run(tmp_path / f"{label}{i}", i, task="Hopper-v5", final=low + i) for i in range(2)]
        groups[label] += [load_run(run) for run in runs]
    numbers = Comparison(groups).to_dict()
    assert numbers["score_ranges"] == {"Hopper-v5": [100.0, 301.0], "Pendulum-v1": [6.0, 12.0]}
    given = Comparison(groups, ranges={"Hopper-v5": [0, 400], "Pendulum-v1": [0, 20]})
    assert given.scores["fast"][0] == pytest.approx(np.array([0.75, 301 / 400]))
    with pytest.raises(ValueError, match="the range of Hopper-v5 must be"):
        Comparison(groups, ranges={"Hopper-v5": [400, 0]})
    with pytest.raises(ValueError, match="'fast' has no run of Hopper-v5"):
        Comparison({**groups, "fast": groups["fast"][:5]})


def test_a_metric_that_was_not_logged_is_an_error_that_lists_the_others(groups):
    with pytest.raises(ValueError, match="has no metric 'nope'; choose one with --metric: eval/mean_reward"):
        Comparison(groups, "nope")


class Tags(HTMLParser):
    """Checks that tags are closed, and collects attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_needs_nothing_else(groups, tmp_path):
    page = tmp_path / "report.html"
    write_report(Comparison(groups), page)
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    assert tags.open == []
    sources = [value for _, name, value in tags.attributes if name in ("src", "href", "xlink:href")]
    assert sources
    assert all(value.startswith(("data:", "#")) for value in sources)
    ids = [value for _, name, value in tags.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in sources if value[0] == "#"} <= set(ids)
    assert not any(tag == "script" for tag, *_ in tags.attributes)
    text = " ".join(tags.words)
    for word in ("slow & steady", "fast", "10", "learning_rate", "abacus", "0.001", "Sample efficiency", "not reached"):
        assert word in text
    assert json.loads(page.with_suffix(".json").read_text()) == json.loads(json.dumps(Comparison(groups).to_dict()))
    assert page.stat().st_size < 300_000


def test_one_group_one_run_and_no_curve_still_make_a_page(tmp_path):
    run = load_run(make_run(tmp_path / "a-seed1", values=(1.0,), final=500.0))
    write_report(Comparison({"only": [run]}), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "No curve" in page
    assert "only: 1 run." in page
    assert "500 to 500" not in page  # one run has no interval
    assert "+5e2" not in page  # numbers on an axis are whole, also where all scores are the same


def test_films_of_one_run_are_told_apart_by_their_file_names(tmp_path):
    run = make_run(tmp_path / "a-seed1", final=2.0)
    for name in ("one.png", "two.png"):
        (run / name).write_bytes(PIXEL)
    write_report(Comparison({"only": [load_run(run)]}), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert all(f"a-seed1/{name}</figcaption>" in text for name in ("one.png", "two.png"))


def test_large_films_are_named_and_not_embedded(groups, tmp_path, monkeypatch):
    monkeypatch.setattr("canter.utils.report.MAX_MEDIUM_BYTES", 10)
    write_report(Comparison(groups), tmp_path / "r.html")
    assert "bytes, more than the 10 that such a file may have" in (tmp_path / "r.html").read_text()


def test_report_groups_by_settings_or_by_hand(groups, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "."]) == 0
    assert "learning_rate=0.01: 5 runs, IQM 10" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["tasks"] == ["Pendulum-v1"]
    hand = ["--group", "a=slow-seed0,slow-seed1", "b=fast-seed0", "--out", "hand.html"]
    assert main(["report", *hand]) == 0
    assert {k: len(g["runs"]) for k, g in json.loads((tmp_path / "hand.json").read_text())["groups"].items()} == {
        "a": 2,
        "b": 1,
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name the runs to compare"),
        (["nothing"], "there is no run in nothing"),
        ([".", "--out", "r.txt"], "must be a .html file"),
        ([".", "--group", "x"], "NAME=RUN,RUN"),
        ([".", "--metric", "nope"], "has no metric 'nope'"),
        ([".", "--score-ranges", "{Pendulum: [0, 1]}"], "score range of 'Pendulum', but no run of it"),
        ([".", "--score-ranges", "{Pendulum-v1: 3}"], "the range of Pendulum-v1 must be its low and its high score"),
    ],
)
def test_mistakes_of_a_report_are_one_line(groups, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *args]) == 2
    assert message in capsys.readouterr().err


def test_any_name_of_a_group_is_written_as_it_is_and_in_every_legend(groups, tmp_path):
    slow, fast = groups.values()
    write_report(Comparison({"_hidden": slow, r"$\frac$ & <b>": fast}), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert text.count(">_hidden</text>") == 3  # beside the intervals, and in the legends of curves and profiles
    assert text.count(r">$\frac$ &amp; &lt;b&gt;</text>") == 3


def test_unfinished_runs_are_named(tmp_path, capsys):
    for seed in (1, 2):
        run = make_run(tmp_path / f"a-seed{seed}", seed, final=9.0 if seed == 1 else None)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["run"] |= {"final_episodes": 4, "total_timesteps": 5000}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    assert "a-seed2 (step 300 of 5,000)" in capsys.readouterr().out
    assert "Not finished" in (tmp_path / "r.html").read_text()
    rows = json.loads((tmp_path / "r.json").read_text())["groups"]["a"]["runs"]
    assert [row["is_finished"] for row in rows] == [True, False]


def test_durations_have_a_fitting_unit():
    assert [duration(s) for s in (5.2, 300.0, 7200.0, float("nan"))] == ["5 s", "5.0 min", "2.0 h", "-"]


@pytest.fixture
def browser():
    """A headless Chromium: that of CANTER_BROWSER, of playwright, or of the system."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as engine:
        path = os.environ.get("CANTER_BROWSER")
        if path is None and not os.path.exists(engine.chromium.executable_path):
            path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
            if path is None:
                pytest.skip("no browser: playwright install chromium, or name one in CANTER_BROWSER")
        browser = engine.chromium.launch(executable_path=path, args=["--no-sandbox", "--no-zygote"])
        yield browser
        browser.close()


@pytest.mark.parametrize("name", ["fast", "num_mini_batches=8, entropy_coef=0.006854, learning_rate=0.0003676"])
def test_a_browser_shows_every_drawing_and_picture_without_an_error(groups, tmp_path, browser, name):
    page_file = tmp_path / "report.html"
    slow, fast = groups.values()
    write_report(Comparison({f"slow & steady, {name}": slow, name: fast}), page_file)
    page = browser.new_page(viewport={"width": 1200, "height": 900}, offline=True)
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    page.goto(page_file.as_uri())
    assert problems == []
    sizes = page.eval_on_selector_all("svg", "all => all.map(e => [e.clientWidth, e.clientHeight])")
    assert len(sizes) == 3
    assert all(width > 600 and height > 60 for width, height in sizes)
    assert page.eval_on_selector("img", "e => e.complete && e.naturalWidth") == 1
    # Nothing is wider than the window, on a screen and on a phone, and no label lies outside of its drawing.
    for width in (1200, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """all => all.flatMap(svg => { const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect();
            return r.left < box.left - 2 || r.right > box.right + 2 || r.bottom > box.bottom + 2; })
            .map(t => t.textContent) })"""
    assert page.eval_on_selector_all("svg", outside) == []
    # No text of a drawing lies on another text of it, and tables are seen whole on a screen.
    page.set_viewport_size({"width": 1200, "height": 900})
    overlaps = """all => all.flatMap(svg => {
        const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.length > 12);
        const boxes = texts.map(t => t.getBoundingClientRect());
        return texts.filter((t, i) => boxes.some((b, j) => j > i && b.left < boxes[i].right && boxes[i].left < b.right
            && b.top + 2 < boxes[i].bottom && boxes[i].top + 2 < b.bottom)).map(t => t.textContent) })"""
    assert page.eval_on_selector_all("svg", overlaps) == []
    assert page.eval_on_selector_all("section", "all => all.filter(e => e.scrollWidth > e.clientWidth).length") == 0


@pytest.mark.parametrize("make", ["link", "device", "pipe", "text"])
def test_a_picture_that_is_none_of_the_run_is_not_embedded(groups, tmp_path, make):
    picture, users = tmp_path / "fast-seed4" / "view.png", tmp_path / "users.png"
    users.write_bytes(PIXEL + b"the user's own")
    picture.unlink()
    if make == "pipe":
        os.mkfifo(picture)
    elif make == "text":
        picture.write_bytes(b"password: 1234")
    else:
        picture.symlink_to(users if make == "link" else "/dev/zero")
    write_report(Comparison(groups), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "view.png is not shown: " in page
    assert all(base64.b64encode(content).decode() not in page for content in (users.read_bytes(), b"password: 1234"))
