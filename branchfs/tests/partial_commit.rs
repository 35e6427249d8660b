//! S8: choosing what a commit takes (`--only`, `--exclude`), and leaving to others what they changed (`--skip`). The branch
//! stays open with what was not committed.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use common::fill_for_parts as fill;
use common::{Content, Mount, Object, assert_same, refusal, shell, snapshot, succeed};

const CHANGES: &str = "echo new >src/a.py; echo new >src/deep/b.py; echo new >src/deep/c.txt; rm -r gone
    rm -r replaced; mkdir -m 700 replaced; echo new >replaced/new.py; echo new >replaced/keep.txt
    mkdir -p fresh/one/two; echo new >fresh/one/two/n.py; echo new >fresh/one/n.txt; echo new >fresh/m.txt; mkdir fresh/empty
    chmod 700 src; mv moved elsewhere; echo more >>elsewhere/file; rm link-to; mkdir link-to; echo in >link-to/in.txt";

/// Commits with options what [`CHANGES`] did, and runs a check on the base: with the rest kept, which is then committed, and
/// with the rest dropped.
fn committed(options: &[&str], check: &str) -> Mount {
    for turn in ["at once", "after a crash", "after it was undone"] {
        let mount = Mount::over(fill);
        let branch = mount.create("work");
        shell(&branch, CHANGES);
        let shown = outline(&branch);
        let words: Vec<&str> = ["commit"].iter().chain(options).chain(&["work"]).copied().collect();
        let done = mount.run(&words, &[]);
        succeed(&done);
        shell(&mount.base(), check);
        if turn == "after a crash" {
            mount.kill();
            mount.mount();
        }
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        let count = format!(
            "branch work stays open: changed paths that were not committed: {}\n",
            would_change(&mount).len()
        );
        assert!(said.ends_with(&count), "{said}, not {count}");
        assert_same(&outline(&mount.branch("work")), &shown, turn);
        if turn == "after it was undone" {
            let said = refusal(&mount.run(&["undo"], &[]));
            assert!(said.contains("branches of the directory are open (work)"), "{said}");
            succeed(&mount.run(&["undo", "--force"], &[]));
            succeed(&mount.run(&["redo"], &[]));
            succeed(&mount.run(&["rebase", "work"], &[]));
        }
        mount.commit("work");
        assert_same(&outline(&mount.base()), &shown, &format!("the rest, {turn}"));
        assert_eq!(mount.ask("list")["branches"].as_array().unwrap().len(), 0);
        succeed(&mount.run(&["undo"], &[]));
        undone(&mount);
        assert!(!mount.store().join("lost").exists());
    }
    let mount = Mount::over(fill);
    shell(&mount.create("work"), CHANGES);
    let words: Vec<&str> =
        ["commit", "--drop-rest"].iter().chain(options).chain(&["work"]).copied().collect();
    succeed(&mount.run(&words, &[]));
    shell(&mount.base(), check);
    assert_eq!(mount.ask("list")["branches"].as_array().unwrap().len(), 0);
    mount
}

/// The paths that a commit of the branch would change.
fn would_change(mount: &Mount) -> Vec<String> {
    let request = json!({"v": 1, "verb": "commit", "branch": "work", "dry_run": true});
    let changes = mount.request(&request)["changes"].as_array().unwrap().clone();
    changes.iter().map(|one| one["path"].as_str().unwrap().to_owned()).collect()
}

/// The times of directories follow from when names came and went.
fn outline(root: &Path) -> BTreeMap<PathBuf, Object> {
    let mut tree = snapshot(root);
    let directories = tree.values_mut().filter(|object| object.content == Content::Directory);
    directories.for_each(|directory| directory.mtime = (0, 0));
    tree
}

/// An undo of what was taken brings the base back whatever was left out.
fn undone(mount: &Mount) {
    let fresh = Mount::over(fill);
    succeed(&mount.run(&["undo"], &[]));
    assert_same(&snapshot(&mount.base()), &snapshot(&fresh.base()), "undone");
}

#[test]
fn only_takes_what_matches_a_pattern() {
    let mount = committed(
        &["--only", "*.py"],
        "test \"$(cat src/a.py src/deep/b.py)\" = $'new\\nnew'; test \"$(cat src/deep/c.txt)\" = old
         test ! -e gone/x.py; test \"$(cat gone/below/y.txt)\" = old
         test ! -e replaced/drop.py; test \"$(cat replaced/keep.txt replaced/new.py)\" = $'old\\nnew'
         test \"$(cat fresh/one/two/n.py)\" = new; test ! -e fresh/m.txt; test ! -e fresh/one/n.txt; test ! -e fresh/empty
         test \"$(stat -c %a src)\" = 755; test \"$(stat -c %a replaced)\" = 755; test -d moved; test ! -e elsewhere; test -f link-to",
    );
    undone(&mount);
}

#[test]
fn only_takes_whole_directories() {
    let mount = committed(
        &["--only", "src", "--only", "/gone/", "--only", "fresh/one", "--only", "link-to"],
        "test \"$(cat src/a.py src/deep/b.py src/deep/c.txt)\" = $'new\\nnew\\nnew'; test \"$(stat -c %a src)\" = 700
         test ! -e gone; test -e fresh/one/n.txt; test -e fresh/one/two/n.py; test ! -e fresh/m.txt; test ! -e fresh/empty
         test \"$(cat replaced/keep.txt replaced/drop.py)\" = $'old\\nold'; test ! -e replaced/new.py; test -d moved; test -d link-to",
    );
    undone(&mount);
}

#[test]
fn exclude_leaves_what_matches_out() {
    let mount = committed(
        &["--exclude", "*.txt", "--exclude", "link-to"],
        "test \"$(cat src/a.py src/deep/b.py)\" = $'new\\nnew'; test \"$(cat src/deep/c.txt)\" = old; test \"$(stat -c %a src)\" = 700
         test ! -e gone/x.py; test \"$(cat gone/below/y.txt)\" = old
         test ! -e replaced/drop.py; test \"$(cat replaced/keep.txt)\" = old; test -e replaced/new.py; test \"$(stat -c %a replaced)\" = 700
         test -e fresh/one/two/n.py; test -d fresh/empty; test ! -e fresh/m.txt; test ! -e moved; test \"$(cat elsewhere/file)\" = $'old\\nmore'",
    );
    undone(&mount);
}

#[test]
fn directories_keep_their_times_where_no_name_of_theirs_is_taken() {
    // What is chosen, and the directories in which names come or go with it.
    let cases: [(&[&str], &[&str]); 5] = [
        (&["--only", "src/deep/b.py"], &[]),
        (&["--only", "gone/below"], &["gone"]),
        (&["--only", "y.txt"], &["gone/below"]),
        (&["--only", "m.txt"], &["", "fresh"]),
        (&["--exclude", "*.py", "--exclude", "fresh", "--only", "replaced", "--only", "src"], &[]),
    ];
    for (options, changed) in cases {
        let mount = Mount::over(fill);
        let branch = mount.create("work");
        shell(&branch, CHANGES);
        shell(&branch, "touch src/deep/new.py .; chmod 711 .; touch -d 2021-01-01 src/deep");
        let times = |root: &Path| -> std::collections::BTreeMap<PathBuf, ((i64, i64), u32)> {
            let tree = snapshot(root).into_iter();
            let directories = tree.filter(|(_, object)| object.content == Content::Directory);
            directories.map(|(path, object)| (path, (object.mtime, object.mode))).collect()
        };
        let before = times(&mount.base());
        let words: Vec<&str> = ["commit"].iter().chain(options).chain(&["work"]).copied().collect();
        succeed(&mount.run(&words, &[]));
        mount.abort("work");
        let after = times(&mount.base());
        for (path, (time, mode)) in &before {
            let Some((now, mode_now)) = after.get(path) else { continue };
            let is_chosen = changed.contains(&path.to_str().unwrap());
            assert_eq!(now != time, is_chosen, "{options:?}: the time of {}", path.display());
            let is_whole = options.contains(&"src") && path.starts_with("src")
                || options.contains(&"replaced") && path.starts_with("replaced");
            assert!(is_whole || mode == mode_now, "{options:?}: the mode of {}", path.display());
        }
        undone(&mount);
    }
}

#[test]
fn a_renamed_directory_goes_whole_or_not_at_all() {
    let mount = Mount::over(fill);
    shell(&mount.create("work"), CHANGES);
    for options in [["--only", "elsewhere"], ["--exclude", "moved"]] {
        let said = refusal(&mount.run(&["commit", options[0], options[1], "work"], &[]));
        assert!(said.contains("the directory moved was renamed to elsewhere"), "{said}");
    }
    let fresh = Mount::over(fill);
    assert_same(&snapshot(&mount.base()), &snapshot(&fresh.base()), "refused");
    succeed(&mount.run(&["commit", "--only", "elsewhere", "--only", "moved", "work"], &[]));
    shell(
        &mount.base(),
        "test ! -e moved; test \"$(cat elsewhere/file)\" = $'old\\nmore'; test -e gone",
    );
    mount.abort("work");
    undone(&mount);
}

/// The base has a directory at the path that the renamed one takes, in a directory of which only a part is committed.
#[test]
fn a_directory_that_was_renamed_into_a_replaced_one_is_committed_with_all_its_files() {
    let mount = Mount::over(fill);
    shell(&mount.base(), "echo other >moved/other");
    let branch = mount.create("work");
    shell(
        &branch,
        "rm -r gone; mkdir gone; mv moved gone/below; echo more >>gone/below/file; echo new >gone/n.txt",
    );
    let shown = outline(&branch);
    let words = ["commit", "--only", "moved", "--only", "gone/below"];
    let said = refusal(&mount.run(&[&words[..], &["--exclude", "y.txt", "work"]].concat(), &[]));
    assert!(said.contains("gone/below was replaced by the directory moved"), "{said}");
    succeed(&mount.run(&[&words[..], &["work"]].concat(), &[]));
    shell(
        &mount.base(),
        "test ! -e moved; test \"$(cat gone/below/file gone/below/other)\" = $'old\\nmore\\nother'
         test ! -e gone/below/y.txt; test -e gone/x.py; test ! -e gone/n.txt",
    );
    assert_same(&outline(&branch), &shown, "the branch");
    mount.commit("work");
    assert_same(&outline(&mount.base()), &shown, "the rest");
}

#[test]
fn a_type_is_not_changed_in_part() {
    let mount = Mount::over(fill);
    shell(&mount.create("work"), "rm -r replaced; echo file >replaced");
    let said = refusal(&mount.run(&["commit", "--exclude", "keep.txt", "work"], &[]));
    assert!(said.contains("replaced is of another type in the branch"), "{said}");
    assert!(mount.base().join("replaced/keep.txt").exists());
    mount.commit("work");
}

#[test]
fn skip_leaves_to_others_what_they_changed() {
    let mount = Mount::over(fill);
    shell(&mount.create("work"), CHANGES);
    shell(
        &mount.base(),
        "echo theirs >src/a.py; echo theirs >gone/below/y.txt; echo theirs >replaced/keep.txt; echo theirs >moved/other; echo theirs >>moved/file
         mkdir fresh; echo theirs >fresh/theirs",
    );
    let said = refusal(&mount.run(&["commit", "work"], &[]));
    assert!(said.contains("the base was changed directly"), "{said}");
    succeed(&mount.run(&["commit", "--skip", "work"], &[]));
    shell(
        &mount.base(),
        "test \"$(cat src/a.py)\" = theirs; test \"$(cat src/deep/b.py src/deep/c.txt)\" = $'new\\nnew'
         test \"$(cat gone/below/y.txt)\" = theirs; test ! -e gone/x.py
         test \"$(cat replaced/keep.txt)\" = theirs; test ! -e replaced/drop.py; test \"$(cat replaced/new.py)\" = new
         test \"$(cat moved/other)\" = theirs; test \"$(cat fresh/theirs)\" = theirs; test -d link-to",
    );
}

#[test]
fn bad_patterns_and_places_are_refused() {
    let mount = Mount::over(fill);
    mount.create("work");
    mount.create_below("work", "child");
    for pattern in ["", "[", "/"] {
        let said = refusal(&mount.run(&["commit", "--only", pattern, "child"], &[]));
        assert!(said.contains("is not a pattern for paths"), "{said}");
    }
    let said = refusal(&mount.run(&["commit", "--only", "x", "child"], &[]));
    assert!(said.contains("only in a commit into main"), "{said}");
    fs::write(mount.branch("child").join("file"), "").unwrap();
    mount.commit("child");
}

/// All the work would be lost.
#[test]
fn a_commit_that_takes_nothing_of_what_was_changed_is_refused() {
    let mount = Mount::over(fill);
    let branch = mount.create("work");
    shell(&branch, "echo new >src/a.py; rm gone/x.py; mkdir fresh; echo new >fresh/n.txt");
    shell(&branch, "mv moved elsewhere");
    let (base, work) = (snapshot(&mount.base()), snapshot(&branch));
    let cases: [(&[&str], &str); 6] = [
        (&["--only", "*.rs", "--only", "/x.py"], "matches '*.rs /x.py'"),
        (&["--exclude", "*"], "is outside '*'"),
        (&["--only", "src", "--exclude", "*.py"], "matches 'src' and is outside '*.py'"),
        (&["--only", "replaced", "--force"], "matches 'replaced'"),
        (&["--only", "replaced", "--skip"], "matches 'replaced'"),
        (&["--only", "replaced", "--dry-run"], "matches 'replaced'"),
    ];
    for (options, wanted) in cases {
        let words: Vec<&str> = ["commit"].iter().chain(options).chain(&["work"]).copied().collect();
        let said = refusal(&mount.run(&words, &[]));
        let wanted = format!("none of the 5 paths that branch work changed {wanted}\n");
        assert!(said.contains(&wanted), "{said}");
        assert!(said.contains("the branch is still open; the first is 'elsewhere'"), "{said}");
        assert_same(&snapshot(&mount.base()), &base, "the base");
        assert_same(&snapshot(&branch), &work, "the branch");
    }
    shell(&branch, "echo more >>src/a.py");
    succeed(&mount.run(&["commit", "--only", "src", "work"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("src/a.py")).unwrap(), "new\nmore\n");
}

/// Where nothing is lost that was not given up.
#[test]
fn a_commit_may_choose_nothing_of_nothing() {
    let mount = Mount::over(fill);
    mount.create("empty");
    succeed(&mount.run(&["commit", "--only", "x", "--exclude", "*", "empty"], &[]));
    shell(&mount.create("skips"), "echo ours >src/a.py; echo ours >src/deep/b.py");
    common::wait_for_the_clock(&mount.base());
    shell(&mount.base(), "echo theirs >src/a.py");
    succeed(&mount.run(&["commit", "--only", "src/a.py", "--skip", "skips"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("src/a.py")).unwrap(), "theirs\n");
    shell(&mount.create("removes"), "rm gone/x.py; echo ours >src/deep/b.py");
    shell(&mount.base(), "rm gone/x.py");
    succeed(&mount.run(&["commit", "--force", "--only", "x.py", "removes"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("src/deep/b.py")).unwrap(), "old\n");
}

/// Something mounted below the base, as long as it lives.
struct Below(PathBuf);

impl Below {
    fn new(mount: &Mount, what: &str, at: &str) -> Self {
        shell(&mount.base(), &format!("mount {what} {at}"));
        Self(mount.base().join(at))
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

/// A volume for `node_modules`, say, a directory and a file of elsewhere.
#[test]
fn a_path_below_a_mount_is_refused_by_name_and_the_rest_can_be_committed() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p volume deep/er other; echo under | tee volume/file deep/er/file bound; echo other > other/file; echo old > file",
        );
    });
    let volume = Below::new(&mount, "-t tmpfs none", "volume");
    let _directory = Below::new(&mount, "--bind other", "deep/er");
    let _file = Below::new(&mount, "--bind other/file", "bound");
    let cases: [(&str, &str, &[&str]); 7] = [
        ("echo x > volume/new", "volume", &["/volume"]),
        ("rm volume/file", "volume", &["/volume"]),
        ("rm -r volume; mkdir volume; echo x > volume/new", "volume", &["/volume"]),
        ("mv volume away", "volume", &["/volume", "/away"]),
        ("echo x > deep/er/file", "deep/er", &["/deep/er"]),
        ("rm -r deep", "deep/er", &["/deep/er"]),
        ("echo x > bound", "bound", &["/bound"]),
    ];
    for (script, path, excluded) in cases {
        let branch = mount.create("work");
        shell(&branch, &format!("grep -qx under volume/file; echo new > file; {script}"));
        for option in [&[][..], &["--force"], &["--skip"], &["--dry-run"]] {
            let words = [&["commit"], option, &["work"]].concat();
            let said = refusal(&mount.run(&words, &[]));
            let wanted = format!("is mounted on {path} in the base");
            assert!(said.contains(&wanted), "{script}, {option:?}: {said}");
        }
        assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "old\n");
        let options = excluded.iter().flat_map(|path| ["--exclude", *path]);
        let words: Vec<&str> = ["commit"].into_iter().chain(options).chain(["work"]).collect();
        succeed(&mount.run(&words, &[]));
        mount.abort("work");
        shell(
            &mount.base(),
            "grep -qx new file; test ! -e volume/new; grep -qx other deep/er/file bound",
        );
        succeed(&mount.run(&["undo"], &[]));
    }
    shell(&mount.create("work"), "echo x > volume/new");
    drop(volume);
    mount.commit("work");
    shell(&mount.base(), "grep -qx under volume/file; grep -qx x volume/new");
}

fn skipping(mount: &Mount, options: &[&str]) -> String {
    let done = mount.run(&[&["commit", "--skip"], options, &["work"]].concat(), &[]);
    succeed(&done);
    String::from_utf8_lossy(&done.stderr).into_owned()
}

#[test]
fn a_path_that_was_skipped_stays_a_conflict_until_it_is_forced() {
    for is_stale in [false, true] {
        let mount = Mount::over(fill);
        shell(&mount.create("work"), "echo ours >src/a.py; rm gone/x.py; echo ours >mine");
        common::wait_for_the_clock(&mount.base());
        let theirs = "echo theirs >src/a.py; echo theirs >gone/x.py";
        let options: &[&str] = if is_stale {
            shell(&mount.create("other"), theirs);
            mount.commit("other");
            &["--rebase"]
        } else {
            shell(&mount.base(), theirs);
            &[]
        };
        for turn in ["first", "second", "third"] {
            let said = skipping(&mount, options);
            assert!(
                said.contains("stays open: changed paths that were not committed: 2"),
                "{said}"
            );
            let said = refusal(&mount.run(&[&["commit"], options, &["work"]].concat(), &[]));
            for path in ["src/a.py", "gone/x.py"] {
                assert!(said.lines().any(|line| line.trim() == path), "{turn}: {said}");
            }
            shell(
                &mount.base(),
                "test \"$(cat src/a.py gone/x.py mine)\" = $'theirs\\ntheirs\\nours'",
            );
            shell(
                &mount.branch("work"),
                "test \"$(cat src/a.py mine)\" = $'ours\\nours'; test ! -e gone/x.py",
            );
            if turn == "second" {
                mount.kill();
                mount.mount();
            }
        }
        let how =
            if is_stale { ["rebase", "--force", "work"] } else { ["commit", "--force", "work"] };
        succeed(&mount.run(&how, &[]));
        if is_stale {
            mount.commit("work");
        }
        shell(&mount.base(), "test \"$(cat src/a.py mine)\" = $'ours\\nours'; test ! -e gone/x.py");
    }
}

#[test]
fn edits_of_others_before_and_after_a_partial_commit_are_found_when_the_rest_is_committed() {
    let cases = [
        ("echo new >src/a.py", "src/a.py"),
        ("rm -r gone", "gone/below/y.txt"),
        ("mv moved there", "moved"),
    ];
    for (change, path) in cases {
        for is_before in [true, false] {
            let mount = Mount::over(fill);
            shell(&mount.create("work"), &format!("{change}; echo new >src/deep/b.py"));
            common::wait_for_the_clock(&mount.base());
            let edit = if path == "moved" {
                "mv moved away; mkdir moved".to_owned()
            } else {
                format!("echo theirs >{path}")
            };
            if is_before {
                shell(&mount.base(), &edit);
            }
            succeed(&mount.run(&["commit", "--only", "b.py", "work"], &[]));
            common::wait_for_the_clock(&mount.base());
            if !is_before {
                shell(&mount.base(), &edit);
            }
            let said = refusal(&mount.run(&["commit", "work"], &[]));
            assert!(said.lines().any(|line| line.trim() == path), "{change}: {said}");
            succeed(&mount.run(&["commit", "--force", "work"], &[]));
        }
    }
}

#[test]
fn a_committed_path_can_be_changed_and_committed_again() {
    let mount = Mount::over(fill);
    let branch = mount.create("work");
    shell(&branch, CHANGES);
    let patterns = ["*.py", "moved", "elsewhere"];
    let only: Vec<&str> = patterns.iter().flat_map(|pattern| ["--only", pattern]).collect();
    succeed(&mount.run(&[&["commit"], &only[..], &["work"]].concat(), &[]));
    shell(
        &branch,
        "echo again >src/a.py; rm -r fresh; mv elsewhere third; echo again >>third/file; mv src/deep/b.py replaced/; rm -r replaced; mkdir gone",
    );
    let shown = outline(&branch);
    mount.commit("work");
    assert_same(&outline(&mount.base()), &shown, "committed again");
}

#[test]
fn siblings_see_a_partial_commit_as_any_other() {
    let mount = Mount::over(fill);
    shell(&mount.create("work"), "echo new >src/a.py; echo new >src/deep/b.py");
    shell(&mount.create("other"), "echo other >link-to");
    succeed(&mount.run(&["commit", "--only", "a.py", "work"], &[]));
    let states = |mount: &Mount| {
        let list = mount.ask("list")["branches"].as_array().unwrap().clone();
        let text = |one: &serde_json::Value, key: &str| one[key].as_str().unwrap().to_owned();
        list.iter().map(|one| (text(one, "name"), text(one, "state"))).collect::<BTreeMap<_, _>>()
    };
    let wanted = [("work", "live"), ("other", "stale")];
    assert_eq!(states(&mount), wanted.map(|(a, b)| (a.to_owned(), b.to_owned())).into());
    succeed(&mount.run(&["rebase", "other"], &[]));
    mount.commit("other");
    assert_eq!(states(&mount)["work"], "stale");
    // Its own first part is no conflict.
    succeed(&mount.run(&["commit", "--rebase", "work"], &[]));
    shell(&mount.base(), "test \"$(cat src/a.py src/deep/b.py link-to)\" = $'new\\nnew\\nother'");
}

#[test]
fn names_of_one_file_that_a_commit_parts_are_two_files_from_then_on() {
    let mount = Mount::over(|base| {
        fill(base);
        shell(base, "ln src/a.py twin.py");
    });
    let branch = mount.create("work");
    shell(
        &branch,
        "echo new >>src/a.py; echo other >one; ln one two; ln one three; ln -s x l1; ln l1 l2",
    );
    succeed(
        &mount.run(&["commit", "--only", "a.py", "--only", "/one", "--only", "l1", "work"], &[]),
    );
    let links = |root: &Path, name: &str| {
        std::os::unix::fs::MetadataExt::nlink(&fs::symlink_metadata(root.join(name)).unwrap())
    };
    for (name, count) in [("one", 1), ("src/a.py", 1), ("l1", 1)] {
        assert_eq!(links(&mount.base(), name), count, "{name} in the base");
    }
    for (name, count) in [("one", 1), ("two", 2), ("three", 2), ("twin.py", 1), ("l2", 1)] {
        assert_eq!(links(&branch, name), count, "{name} in the branch");
    }
    shell(
        &branch,
        "echo more >>two; test \"$(cat one two three twin.py)\" = $'other\\nother\\nmore\\nother\\nmore\\nold\\nnew'",
    );
    shell(&mount.base(), "test \"$(cat one src/a.py twin.py)\" = $'other\\nold\\nnew\\nold'");
    mount.commit("work");
    shell(
        &mount.base(),
        "test \"$(cat one three twin.py)\" = $'other\\nother\\nmore\\nold\\nnew'; test two -ef three; test ! one -ef two",
    );
}

#[test]
fn big_files_that_were_copied_in_part_and_attributes_stay_with_the_rest() {
    let mount = Mount::unmounted(|base| {
        fill(base);
        shell(base, "for f in big bigger; do seq 100000 >$f; done");
    })
    .with_big_files_from(65536);
    mount.mount();
    let branch = mount.create("work");
    shell(
        &branch,
        "for f in big bigger; do printf XXXX | dd of=$f bs=1 seek=200000 conv=notrunc status=none; done; chmod 600 src/deep/b.py link-to; chmod 700 gone",
    );
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(branch.join("src"), "user.x", b"y", flags).unwrap();
    let shown = outline(&branch);
    succeed(&mount.run(&["commit", "--only", "big", "--only", "b.py", "work"], &[]));
    assert_same(&outline(&branch), &shown, "the branch");
    assert_eq!(would_change(&mount), ["bigger", "gone", "link-to", "src"]);
    mount.kill();
    mount.mount();
    mount.commit("work");
    assert_same(&outline(&mount.base()), &shown, "the base");
}

#[test]
fn a_branch_that_nested_branches_were_committed_into_is_committed_in_part() {
    let mount = Mount::over(fill);
    let branch = mount.create("work");
    shell(&branch, "mv moved one; echo work >one/work; echo work >src/a.py; rm gone/x.py");
    let child = mount.create_below("work", "child");
    shell(
        &child,
        "mv one two; echo child >two/child; echo child >src/a.py; rm -r src/deep; mkdir src/deep; echo child >src/deep/new",
    );
    mount.commit("child");
    let shown = outline(&branch);
    succeed(&mount.run(&["commit", "--only", "src", "work"], &[]));
    assert_same(&outline(&branch), &shown, "the branch");
    succeed(
        &mount.run(
            &["commit", "--only", "moved", "--only", "two", "--exclude", "child", "work"],
            &[],
        ),
    );
    assert_same(&outline(&branch), &shown, "the branch");
    mount.commit("work");
    assert_same(&outline(&mount.base()), &shown, "the base");
}
