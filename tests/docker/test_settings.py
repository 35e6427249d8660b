"""Precedence of settings, as a table: flag, environment, the project's file, the user's; and what is refused."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest

from branching_docker.errors import SettingsError
from branching_docker.settings import LISTS, NAMES, Settings, gather, idle_seconds

if TYPE_CHECKING:
    from pathlib import Path

PLACES = ("flag", "environment", "project", "user")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A project's directory and a user's configuration directory."""
    project, user = tmp_path / "project", tmp_path / "config"
    project.mkdir()
    user.mkdir()
    return project, user


def settings(places: tuple[Path, Path], *, project: str = "", user: str = "", **environ: str) -> Settings:
    """What holds with these files and variables."""
    (places[0] / "branching-docker.toml").write_text(project)
    (places[1] / "branching-docker.toml").write_text(user)
    return gather({}, environ={"XDG_CONFIG_HOME": str(places[1]), **environ}, workspace=places[0])


@pytest.mark.contract("7.8")
@pytest.mark.parametrize(
    "said", [subset for size in range(5) for subset in itertools.combinations(PLACES, size)], ids="-".join
)
@pytest.mark.parametrize("name", ["image", "network", "memory", "driver"])
def test_the_first_of_flag_environment_project_user_counts(
    places: tuple[Path, Path], said: tuple[str, ...], name: str
) -> None:
    """Every setting kind with every subset of the four places."""
    words = {"driver": ("auto", "fuse", "overlay", "fuse"), "network": ("none", "bridge", "none", "host")}
    words["memory"] = ("1g", "2g", "3g", "4g")
    values = dict(zip(PLACES, words.get(name, PLACES), strict=True))
    for place, directory in (("project", places[0]), ("user", places[1])):
        if place in said:
            (directory / "branching-docker.toml").write_text(f'{name} = "{values[place]}"\n')
    found = gather(
        {name: values["flag"] if "flag" in said else None},
        environ={"XDG_CONFIG_HOME": str(places[1])}
        | ({f"BRANCHING_{name.upper()}": values["environment"]} if "environment" in said else {}),
        workspace=places[0],
    )
    expected = next((values[place] for place in PLACES if place in said), getattr(Settings(), name))
    assert getattr(found, name) == expected


def test_lists_are_added_up_and_the_strongest_stands_last(places: tuple[Path, Path]) -> None:
    (places[0] / "branching-docker.toml").write_text('volume = ["./cache:/cache"]\n[env]\nA = "project"\n')
    (places[1] / "branching-docker.toml").write_text('env = ["A=user", "B"]\nvolume = ["named:/named"]\n')
    found = gather({"env": ["A=flag"]}, environ={"XDG_CONFIG_HOME": str(places[1])}, workspace=places[0])
    assert found.env == ("A=user", "B", "A=project", "A=flag")
    assert found.volume == ("named:/named", f"{places[0]}/cache:/cache")


def test_the_users_file_is_found_in_the_home_directory_too(tmp_path: Path) -> None:
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "branching-docker.toml").write_text('image = "mine"\n')
    assert gather({}, environ={"HOME": str(tmp_path)}, workspace=None).image == "mine"


def test_numbers_may_be_written_as_numbers(places: tuple[Path, Path]) -> None:
    found = settings(places, user="cpus = 1.5\npids-limit = 100\n")
    assert (found.cpus, found.pids_limit) == ("1.5", "100")


@pytest.mark.parametrize("word", ["1", "true", "Yes"])
def test_root_may_be_asked_for_by_a_variable(places: tuple[Path, Path], word: str) -> None:
    assert settings(places, BRANCHING_ROOT=word).root
    assert not settings(places, BRANCHING_ROOT="0").root


def test_no_word_has_two_meanings() -> None:
    """A flag, a key and a variable of one setting have one name, and an empty variable says nothing."""
    assert set(LISTS) < set(NAMES)
    assert gather({}, environ={"BRANCHING_IMAGE": ""}, workspace=None) == Settings()


@pytest.mark.parametrize(
    ("user", "message", "hint"),
    [
        ("image = ", "is not TOML", "correct that line"),
        ("imgae = 'x'", 'no setting "imgae"', "did you mean image"),
        ("frobnicate = 1", 'no setting "frobnicate"', "--help"),
        ("image = 7\nnetwork = true", "network is not a string", "network ="),
        ("image = ''", "image is not a string", "image ="),
        ("env = 'A=1'", "env is not a list", "env = ["),
        ("env = [1]", "env is not a list", "env = ["),
        ("root = 'yes'", "neither true nor false", "root = true"),
        ("driver = 'fast'", 'driver cannot be "fast"', "auto, fuse, overlay"),
        ("pull = 'sometimes'", 'pull cannot be "sometimes"', "always, missing, never"),
        ("idle = '5 minutes'", r"config/branching-docker\.toml: .* not an idle time", "5m"),
        ("image = '--privileged'", 'image cannot be "--privileged"', "docker image ls"),
        ("image = 'a b'", 'image cannot be "a b"', "docker image ls"),
        ("network = '-x'", 'network cannot be "-x"', "name"),
        ("memory = 'lots'", 'memory cannot be "lots"', "512m"),
        ("cpus = 'all'", 'cpus cannot be "all"', "0.5"),
        ("pids-limit = 1.5", 'pids-limit cannot be "1.5"', "500"),
        ("name = 'a/b'", 'name cannot be "a/b"', "letters"),
        ("[env]\nA = ['a']", "env A is not a string", 'A = "..."'),
        ("env = ['=1']", 'env "=1" has no name', "NAME=VALUE"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_place_where_it_is_set(
    places: tuple[Path, Path], user: str, message: str, hint: str
) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        settings(places, user=user)
    assert hint in refused.value.hint
    assert refused.value.exit_code == 125


@pytest.mark.parametrize(
    "project",
    [
        'user = "0"',
        "root = true",
        'pull = "always"',
        'publish = ["80:80"]',
        'engine = "podman"',
        'name = "x"',
        'env-file = ["f"]',
        'network = "host"',
        'network = "container:other"',
        'env = ["AWS_SECRET_ACCESS_KEY"]',
        'env = ["LD_PRELOAD=/src/evil.so"]',
        'env = ["PATH=/src"]',
        'env = ["PYTHONPATH=/src"]',
        'env = ["BRANCHING_ROOT=1"]',
        'env = ["BASH_ENV=/src/x"]',
        'env = ["GIT_CONFIG_COUNT=0"]',
        'volume = ["/:/host"]',
        'volume = ["./..:/up"]',
        'volume = ["./link:/out"]',
        'volume = ["named:/x"]',
        'volume = ["./here"]',
        'volume = ["./here:/usr/local/bin"]',
        'volume = ["./here:/mnt/../etc"]',
        'volume = ["./here://src"]',
        'volume = ["./here:/"]',
        'volume = ["./here:/mnt/x:rshared"]',
    ],
)
def test_a_project_reaches_no_further_than_itself(places: tuple[Path, Path], project: str) -> None:
    """Settings that act before anything is isolated. The user's own file may set all of them."""
    (places[0] / "link").symlink_to("/etc")
    with pytest.raises(SettingsError, match="a project may not set"):
        settings(places, project=project)
    settings(places, user=project)


def test_a_project_may_make_its_container_smaller(places: tuple[Path, Path]) -> None:
    text = 'image = "tools"\nnetwork = "none"\nmemory = "1g"\ncpus = "1"\nenv = ["CI=1"]\nvolume = ["./a:/a:ro"]\n'
    found = settings(places, project=text)
    assert (found.image, found.network, found.env) == ("tools", "none", ("CI=1",))


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("2h", 7200)])
def test_an_idle_time_is_read(text: str, seconds: int) -> None:
    assert idle_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "m", "1d", "1.5h", "٣"])
def test_no_other_idle_time_is_read(text: str) -> None:
    with pytest.raises(SettingsError):
        idle_seconds(text)


def test_a_truth_among_variables_is_as_toml_has_it(places: tuple[Path, Path]) -> None:
    assert settings(places, user="[env]\nA = true\nB = 1.5").env == ("A=true", "B=1.5")


@pytest.mark.parametrize("kind", ["directory", "too large", "not UTF-8", "a pipe"])
def test_a_file_that_cannot_be_one_is_named(places: tuple[Path, Path], kind: str) -> None:
    path = places[1] / "branching-docker.toml"
    content: Any = {"too large": b"#" * (2 << 20), "not UTF-8": b"\xff"}
    if kind == "directory":
        path.mkdir()
    elif kind == "a pipe":  # which nobody writes into
        os.mkfifo(path)
    else:
        path.write_bytes(content[kind])
    with pytest.raises(SettingsError, match=r"branching-docker\.toml"):
        gather({}, environ={"XDG_CONFIG_HOME": str(places[1])}, workspace=None)
