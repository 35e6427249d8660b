"""Options of `run`, `shell` and the races: caches, losers that stay, where a command starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import branching


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


class TestCache:
    def test_writes_to_a_cache_survive_a_failed_command(self, root: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        script = f"echo it >{cache}/crate; echo no >beside; exit 3"
        done = branching(root, "run", "--cache", str(cache), "--", "sh", "-c", script)
        assert (done.code, (cache / "crate").read_text()) == (3, "it\n")
        assert not (root / "beside").exists()
        done = branching(root, "run", "--", "sh", "-c", f"echo it >{cache}/other")
        assert done.code != 0, "without the option it is read-only, or not there"
        assert not (cache / "other").exists()

    def test_candidates_of_a_race_and_a_shell_share_a_cache(
        self, root: Path, tmp_path: Path
    ) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        words = ["best-of-n", "-n", "2", "--cache", str(cache), "--"]
        done = branching(root, *words, "sh", "-c", f"touch {cache}/$BRANCHING_ATTEMPT")
        assert done.code == 0
        assert sorted(path.name for path in cache.iterdir()) == ["0", "1"]
        done = branching(root, "shell", "--cache", str(cache), "--", "touch", f"{cache}/shell")
        assert (done.code, (cache / "shell").exists()) == (0, True)

    def test_a_socket_in_a_cache_cannot_be_reached(self, root: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(cache / "socket"))
            server.listen()
            done = branching(root, "run", "--cache", str(cache), "--", "true")
        assert (done.code, f"listens at the socket {cache}/socket" in done.err) == (2, True)

    @pytest.mark.parametrize("name", ["~", "~/.ssh", "/", "/tmp", "/usr/lib", "/etc"])
    def test_a_directory_in_which_a_write_takes_effect_elsewhere_is_refused(
        self, root: Path, tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "home/.ssh").mkdir(parents=True)
        done = branching(root, "run", "--cache", name, "--", "true", HOME=str(tmp_path / "home"))
        assert (done.code, f"--cache {name}: " in done.err) == (2, True)

    def test_directories_around_and_in_the_workspace_are_refused(
        self, real: Mounted, tmp_path: Path
    ) -> None:
        (real.base / "inside").mkdir()
        (tmp_path / "link").symlink_to(real.base / "inside")
        for cache in (real.base, real.base / "inside", real.base.parent, tmp_path / "link"):
            done = branching(real.root, "run", "--cache", str(cache), "--", "true")
            assert (done.code, "workspace" in done.err) == (2, True), cache
        done = branching(real.root, "run", "--cache", str(tmp_path / "none"), "--", "true")
        assert (done.code, "mkdir -p" in done.err) == (2, True)


class TestKeepLosers:
    RACE = ("speculate", "-c", "touch won", "-c", "touch lost; exit 1", "--parallel", "1")

    def test_the_branches_of_losers_stay(self, root: Path) -> None:
        reversed_race = ["speculate", "-c", "touch lost; exit 1", "-c", "touch won"]
        words = [*reversed_race, "--parallel", "1", "--keep-losers", "--json"]
        done = branching(root, *words)
        assert done.code == 0, done.err
        [loser] = done.document["kept"]
        assert (done.document["action"], loser[-2:]) == ("committed", "-0")
        assert branching(root, "diff", loser).out == "A lost\n"
        assert branching(root, "commit", "--rebase", loser).code == 0
        assert (root / "lost").exists()

    def test_without_the_option_they_are_dropped(self, root: Path) -> None:
        assert branching(root, *self.RACE, "--json").document["kept"] == []

    def test_the_hint_names_the_commands_for_kept_losers(self, root: Path) -> None:
        words = ["best-of-n", "-n", "2", "--keep-losers", "--", "touch", "made"]
        done = branching(root, *words)
        assert "Hint: 1 branch of other candidates kept: branching diff NAME" in done.err
        [name] = [each["name"] for each in branching(root, "ls", "--json").document["branches"]]
        assert branching(root, "abort", name).code == 0

    def test_a_setup_nests_the_branches_and_is_refused(self, root: Path) -> None:
        done = branching(root, *self.RACE, "--keep-losers", "--setup", "true")
        assert (done.code, "--keep-losers cannot be combined with" in done.err) == (2, True)


class TestDirectory:
    def test_a_command_starts_where_the_caller_is(self, root: Path) -> None:
        (root / "sub/below").mkdir(parents=True)
        script = 'test "$PWD" = "$(pwd)" && pwd; touch here'
        done = branching(root / "sub/below", "run", "--", "sh", "-c", script)
        assert (done.code, done.out) == (0, f"{root}/sub/below\n")
        assert (root / "sub/below/here").exists()
        words = ["speculate", "-w", str(root), "-c", "pwd >where"]
        assert branching(root / "sub", *words).code == 0
        assert (root / "sub/where").read_text() == f"{root}/sub\n"
        done = branching(Path("/"), "run", "-w", str(root), "--", "pwd")
        assert done.out == f"{root}\n"

    def test_a_directory_that_the_branch_lacks_is_an_error(self, root: Path) -> None:
        (root / "sub").mkdir()
        words = ["run", "--setup", 'rmdir "$PWD"', "--", "true"]
        done = branching(root / "sub", *words)
        assert (done.code, "the directory 'sub' does not exist" in done.err) == (125, True)
        assert (root / "sub").exists()


class TestShell:
    def test_the_words_after_two_dashes_are_the_command(self, root: Path) -> None:
        done = branching(root, "shell", "--", "sh", "-c", "touch made; exit 4")
        assert done.code == 4, done.err
        [name] = [each["name"] for each in branching(root, "ls", "--json").document["branches"]]
        done = branching(root, "shell", name, "--", "ls")
        assert set(done.out.split()) == {"made", NAME_FROM}
        done = branching(root, "shell", name, stdin="exit 5\n", SHELL="/bin/sh")
        assert done.code == 5
        assert branching(root, "abort", name).code == 0
        assert branching(root, "shell", "none", "--", "ls").code == 125


def test_the_settings_file_of_the_user_has_defaults(root: Path, tmp_path: Path) -> None:
    directory = tmp_path / "config/branching"
    directory.mkdir(parents=True)
    file = directory / "config.toml"
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    file.write_text('hide = ["secret"]\non-error = "keep"\n[best-of-n]\nn = 2\n')
    (root / "secret").write_text("key")
    done = branching(root, "run", "--", "cat", "secret", **environment)
    assert (done.code, "kept branch" in done.err) == (1, True)
    done = branching(root, "run", "--on-error", "abort", "--", "cat", "secret", **environment)
    assert "aborted" in done.err
    done = branching(root, "best-of-n", "--json", "--", "true", **environment)
    assert done.document["candidate_count"] == 2
    file.write_text("clean-env = true\n")
    words = ("run", "--", "sh", "-c", "test -z $KEY")
    assert branching(root, *words, KEY="1", **environment).code == 0
    done = branching(root, *words, KEY="1", BRANCHING_NO_CONFIG="1", **environment)
    assert done.code == 1, done.err
    for text, why in (
        ("hid = []", "there is no option --hid"),
        ("hide = 3", "hide"),
        ("[best-of]\nn = 2", "there is no command best-of"),
        ("hide = ", "is not TOML"),
        ('on-error = "explode"', "explode"),
    ):
        file.write_text(text)
        done = branching(root, "run", "--", "true", **environment)
        assert (done.code, str(file) in done.err, why in done.err) == (2, True, True), done.err
