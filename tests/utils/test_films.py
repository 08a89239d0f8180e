"""Frames are encoded as they are added, and read back within limits."""

import sys

import numpy as np
import pytest

from canter.utils.films import Film, FilmError, read_film


def frame(number, height=41, width=60):
    """White, with a dark block whose left edge is at 2 * number."""
    picture = np.full((height, width, 3), 255, np.uint8)
    picture[10:30, 2 * number : 2 * number + 10] = 20
    return picture


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_a_film_has_the_frames_that_were_added(tmp_path, name):
    with Film(tmp_path / "new" / name, fps=25) as film:
        for number in range(12):
            film.add(frame(number))
        assert film.num_frames == 12
    frames, fps = read_film(film.path)
    assert len(frames) == 12
    assert fps == pytest.approx(25, rel=0.02)
    assert frames.shape[1:] == ((40, 60, 3) if name == "a.mp4" else (41, 60, 3))  # its codec needs even sides
    for number in range(12):
        assert np.abs(frames[number].astype(int) - frame(number)[: frames.shape[1]]).mean() < 6


def test_frames_go_to_the_encoder_and_are_not_kept(tmp_path, monkeypatch):
    sent = []

    class Encoder:
        def write_frames(self, path, size, **options):
            while True:
                sent.append((yield))

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", Encoder())
    film = Film(tmp_path / "a.mp4")
    for number in range(3):
        film.add(frame(number))
        assert len(sent) == number + 1
    kept = [value for value in vars(film).values() if isinstance(value, (np.ndarray, list))]
    assert kept == []


def test_a_long_wide_film_is_read_thinned_out(tmp_path):
    with Film(tmp_path / "a.mp4", fps=30) as film:
        for number in range(25):
            film.add(frame(number, width=100))
    frames, fps = read_film(film.path, max_frames=10, max_width=50)
    assert frames.shape == (7, 20, 50, 3)  # frames 0, 4, ... 24
    assert fps == pytest.approx(30 / 4)


def film_until(path, error):
    """Add a frame to a film, then raise an error."""
    with Film(path) as film:
        film.add(frame(1))
        raise error


def test_a_film_that_fails_leaves_the_earlier_one(tmp_path):
    with Film(tmp_path / "a.mp4") as film:
        film.add(frame(0))
    before = film.path.read_bytes()
    with pytest.raises(RuntimeError, match="no display"):
        film_until(film.path, RuntimeError("no display"))
    assert film.path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [film.path]


def test_ctrl_c_completes_a_film(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        film_until(tmp_path / "a.mp4", KeyboardInterrupt())
    assert len(read_film(tmp_path / "a.mp4")[0]) == 1


@pytest.mark.parametrize("fails", ["send", "nothing"])
def test_an_encoder_that_writes_nothing_is_an_error_with_the_name_of_the_film(tmp_path, monkeypatch, fails):
    class Encoder:
        def write_frames(self, path, size, **options):
            yield
            while True:
                if fails == "send":
                    raise BrokenPipeError("FFMPEG COMMAND")
                yield

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", Encoder())
    with (
        pytest.raises(FilmError, match=r"the encoder (stopped|wrote nothing).*a\.mp4"),
        Film(tmp_path / "a.mp4") as film,
    ):
        film.add(frame(0))
    assert list(tmp_path.iterdir()) == []


def test_a_film_in_a_place_that_cannot_be_written_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FilmError, match=r"file/a\.mp4"), Film(tmp_path / "file" / "a.mp4") as film:
        film.add(frame(0))


def test_what_cannot_be_filmed_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"must be .mp4 or .gif, not a.avi"):
        Film(tmp_path / "a.avi")
    with Film(tmp_path / "a.gif") as film:
        with pytest.raises(ValueError, match=r"got \(4, 4\)"):
            film.add(np.zeros((4, 4)))
        film.add(frame(0))
        with pytest.raises(ValueError, match=r"the frame 1 is \(20, 60, 3\), the first one was \(41, 60, 3\)"):
            film.add(frame(1)[:20])
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=r"canter\[video\]"):
        Film(tmp_path / "b.mp4")
