"""The settings file: defaults, overrides, and mistakes answered with the nearest right word."""

from pathlib import Path

import pytest

from align.dumpers.errors import ConfigError
from align.init import CONFIG, TARGET, write_example
from align.settings import Settings, load_settings


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    assert load_settings(tmp_path / "align.toml", {}) == Settings()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "align.toml"
    path.write_text('[run]\ndevice = "cuda"\nseed = 5\n')
    settings = load_settings(path, {"run": {"device": "cpu"}})
    assert (settings.run.device, settings.run.seed) == ("cpu", 5)


def test_an_unknown_key_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "align.toml"
    path.write_text("[run]\ndevise = 'cpu'\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    assert caught.value.problem.endswith("unknown key 'run.devise'")
    assert caught.value.remedy == "did you mean 'device'?"


@pytest.mark.parametrize("text", ["[run\n", "[run]\nseed = 'x'\n", "run = 3\n"])
def test_a_broken_file_is_a_two_line_error_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "align.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"align\.toml"):
        load_settings(path, {})


def test_init_writes_a_file_that_loads_with_every_default(tmp_path: Path) -> None:
    written = write_example(tmp_path)
    assert [path.name for path in written] == ["align.toml", "align_target.py"]
    loaded = load_settings(tmp_path / "align.toml", {})
    assert loaded.model_copy(update={"run": Settings().run}) == Settings()
    assert loaded.run.target == "align_target.py:build"
    assert CONFIG.startswith("#")
    assert "def build" in TARGET
