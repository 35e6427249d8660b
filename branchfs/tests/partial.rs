//! S8: choosing what a commit takes (`--only`, `--exclude`), and leaving to others what they changed (`--skip`).

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Content, Mount, assert_same, refusal, shell, snapshot, succeed};

fn fill(base: &Path) {
    shell(
        base,
        "mkdir -p src/deep gone/below replaced moved
         echo old >src/a.py; echo old >src/deep/b.py; echo old >src/deep/c.txt; echo old >gone/x.py; echo old >gone/below/y.txt
         echo old >replaced/keep.txt; echo old >replaced/drop.py; echo old >moved/file; echo old >link-to
         find . -exec touch -h -d '2020-01-01 00:00:00.123456789' {} +",
    );
}

const CHANGES: &str = "echo new >src/a.py; echo new >src/deep/b.py; echo new >src/deep/c.txt; rm -r gone
    rm -r replaced; mkdir -m 700 replaced; echo new >replaced/new.py; echo new >replaced/keep.txt
    mkdir -p fresh/one/two; echo new >fresh/one/two/n.py; echo new >fresh/one/n.txt; echo new >fresh/m.txt; mkdir fresh/empty
    chmod 700 src; mv moved elsewhere; echo more >>elsewhere/file; rm link-to; mkdir link-to; echo in >link-to/in.txt";

/// Commits with options what [`CHANGES`] did, and runs a check on the base.
fn committed(options: &[&str], check: &str) -> Mount {
    let mount = Mount::over(fill);
    shell(&mount.create("work"), CHANGES);
    let words: Vec<&str> = ["commit"].iter().chain(options).chain(&["work"]).copied().collect();
    succeed(&mount.run(&words, &[]));
    shell(&mount.base(), check);
    mount
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
    undone(&mount);
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
    assert!(said.contains("the base was changed by others"), "{said}");
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
fn skip_and_siblings() {
    let mount = Mount::with(&["--policy", "snapshot"], fill);
    let (one, two) = (mount.create("one"), mount.create("two"));
    shell(&one, "echo one >src/a.py; rm -r gone; mv moved away");
    shell(
        &two,
        "echo two >src/a.py; echo two >gone/new; echo two >moved/file; echo two >mine; rm replaced/drop.py",
    );
    mount.commit("one");
    succeed(&mount.run(&["commit", "--skip", "two"], &[]));
    shell(
        &mount.base(),
        "test \"$(cat src/a.py)\" = one; test ! -e gone; test ! -e moved; test \"$(cat away/file)\" = old; test \"$(cat mine)\" = two
         test ! -e replaced/drop.py",
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
    assert!(said.contains("in a commit into main alone"), "{said}");
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
fn what_lies_under_a_mount_is_refused_by_name_and_the_rest_can_be_committed() {
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
