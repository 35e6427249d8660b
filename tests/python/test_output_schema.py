"""docs/output.schema.json is what `--json` prints: every command's document, and no field more."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path
from typing import Any, cast

import jsonschema  # type: ignore[import-untyped]
import pytest
from conftest import Mounted
from support.command import Running, branching

from branching import Workspace
from branching.cli.app import app

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "output.schema.json").read_text()
)


def strict() -> dict[str, Any]:
    """The schema without room for fields that it does not name."""
    schema = copy.deepcopy(SCHEMA)
    for definition in schema["$defs"].values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    return schema


VALIDATOR = jsonschema.Draft202012Validator(strict())


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for command in SCHEMA["properties"]["command"]["enum"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"version": 1, "command": command}, SCHEMA)


def test_it_has_every_command_that_takes_json() -> None:
    def takes_json(callback: Any) -> bool:
        names = callback.__annotations__
        return "json" in names or any("JsonOption" in str(each) for each in names.values())

    found = {each.name for each in app.registered_commands if takes_json(each.callback)}
    assert found - {"shell"} == set(SCHEMA["properties"]["command"]["enum"])


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


FAILING = ["-c", "echo x; exit 3"]


@pytest.mark.contract("6.3")
@pytest.mark.timeout(600)  # forty commands, one after another
def test_every_document_is_as_it_says(root: Path, place: Path) -> None:
    """One life of a workspace, in which each command is used."""

    def check(*words: str, code: int | None = 0) -> dict[str, Any]:
        done = branching(root, words[0], "--json", *words[1:])
        assert code is None or done.code == code, (words, done)
        errors = [error.message for error in VALIDATOR.iter_errors(done.document)]
        assert errors == [], (words, done.document)
        assert done.document["command"] == words[0]
        used.add(words[0])
        check_uniform_fields(done.document)
        return cast("dict[str, Any]", done.document)

    used: set[str] = set()
    check("doctor", code=None)  # whatever is missing on this machine
    check("status")
    for script in ("echo a > a; echo b > b", "rm a; mv b c; mkdir d; ln -s c link"):
        check("run", "--", "sh", "-c", script)
    check("run", "--on-error", "keep", "-b", "kept", "--", "sh", "-c", "echo z > c; exit 3", code=3)
    check("run", "--timeout", "0.2", "--", "sleep", "60", code=124)
    check("run", "--", "no-such-program", code=127)
    check("ls")
    check("diff", "kept")
    check("speculate", *FAILING, "-c", "true")
    check("speculate", *FAILING, "--on-error", "keep", code=1)
    check("best-of-n", "-n", "2", "--", "sh", "-c", "echo 0.5 >&3")
    check("best-of-n", "-n", "1", "--", "false", code=1)
    check("reflexion", "--retries", "2", "--", "false", code=1)
    check("cascaded", "--", "true")
    check("tournament", "--judge", "echo a", "-c", "true", "-c", "true", *FAILING)
    check("beam-search", "--expand", "echo true", "-c", "true", "--max-depth", "2")
    check("tree-of-thoughts", "--expand", "echo true", "-c", "true", "--max-depth", "2")
    candidates = ("-c", "exit 3", "-c", "echo 1 > forked", "-c", "true")
    forked = check("fork", *candidates, "--test-command", "test -e forked")
    assert [each["state"] for each in forked["results"]] == ["failed", "won", "succeeded"]
    check("fork", "-c", "false", code=1)
    newest = str(check("history")["commits"][0]["id"])
    steps = "save a, save, show ID, undo --force, redo, restore a --force".replace("ID", newest)
    for step in steps.split(", "):
        check(*step.split())
    log = check("log")
    check("log", log["candidates"][0]["branch"])
    exported = place / "kept.tar"
    archive = check("export", "kept", "-o", str(exported))
    assert (archive["output"], archive["bytes"]) == (str(exported), exported.stat().st_size)
    for script, code in (("touch made", 0), ("exit 3", 3)):
        words = ["--base", str(root), "--out", str(place / f"{code}.tar"), "--", "sh", "-c", script]
        check("attempt", *words, code=code)
    check("abort", "kept")
    check("load", "loaded", str(exported))
    ends = "rebase loaded, commit --dry-run loaded, commit --force loaded, prune, create by-path"
    for step in ends.split(", "):
        check(*step.split())
    for each in check("ls")["branches"]:
        check("abort", each["name"])
    exported.unlink()
    assert used | {"close"} == set(SCHEMA["properties"]["command"]["enum"])


def test_close_on_a_mount_that_create_made(place: Path) -> None:
    base = place / "project"
    base.mkdir()
    assert branching(base, "create", "by-path").code == 0
    VALIDATOR.validate(branching(base, "close", "--json").document)
    assert branching(base, "abort", "by-path").code == 0


def check_uniform_fields(document: dict[str, Any]) -> None:
    """The fields that every command with candidates has agree with its older ones."""
    if "results" not in document:
        return
    winner = document["winner"]
    if isinstance(winner, str):
        winner = [each["label"] for each in document["results"]].index(winner)
    elif isinstance(winner, dict):
        winner = winner["index"]
    assert document["winner_index"] == winner
    counts = {document.get(name) for name in ("candidates", "n", "attempts", "candidate_count")}
    assert counts - {None} == {len(document["results"])}


def running(command: str, script: str) -> list[str]:
    """The words of a command that tries a script once, or twice if it must."""
    own = {
        "run": ["--", "sh", "-c", script],
        "best-of-n": ["-n", "1", "--", "sh", "-c", script],
        "reflexion": ["--retries", "1", "--", "sh", "-c", script],
        "cascaded": ["--fan-out", "1", "--", "sh", "-c", script],
        "tournament": ["--judge", "echo a", "-c", script, "-c", script],
        "beam-search": ["--expand", "true", "-c", script],
    }
    return own.get(command, ["-c", script])


SEVEN = ["best-of-n", "beam-search", "cascaded", "reflexion", "speculate", "tournament"]
SEVEN += ["tree-of-thoughts"]


@pytest.mark.parametrize("command", ["run", *SEVEN])
def test_a_failure_and_a_timeout_have_the_same_document(root: Path, command: str) -> None:
    for options, script, codes in (
        ([], "exit 3", (1, 3)),
        (["--timeout", "0.3"], "sleep 60", (124,)),
        (["--on-error", "keep"], "touch made; exit 3", (1, 3)),
    ):
        done = branching(root, command, "--json", *options, *running(command, script))
        assert done.code in codes, done
        assert list(VALIDATOR.iter_errors(done.document)) == [], done.document
        assert done.document["action"] == ("kept" if "keep" in options else "aborted")
        for result in done.document.get("results", ()):
            assert result["success"] is False
        if 124 in codes:
            ended = {each["ended"] for each in done.document.get("results", [done.document])}
            assert "timeout" in ended
            assert ended <= {"timeout", None}
    with Workspace(root) as space:
        for record in space.branches():
            space.reopen(record.name).abort()


@pytest.mark.parametrize("command", ["run", *SEVEN])
def test_an_interrupted_call_prints_no_half_of_one(root: Path, command: str) -> None:
    run = Running(root, [command, "--json", *running(command, "echo up; sleep 600")])
    run.wait_for_line("up")
    run.signal(signal.SIGINT)
    done = run.done()
    assert (done.code, done.out) == (130, "")
    jsonschema.validate(json.loads(done.err.splitlines()[-1]), SCHEMA["$defs"]["failure"])


def test_a_failure_has_a_document_too(root: Path) -> None:
    done = branching(root, "diff", "--json", "none")
    assert (done.code, done.out) == (125, "")
    jsonschema.validate(json.loads(done.err), SCHEMA["$defs"]["failure"])
