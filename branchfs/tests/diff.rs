//! The changes of a branch (S14 of docs/semantics.md): the list, and the patch, which `git apply` must accept.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::work::Random;
use common::{Content, Mount, refusal, shell, snapshot, succeed};

/// `change path`, `change from => path`, and the aspects in parentheses, as the JSON has them.
fn listed(mount: &Mount, branch: &str) -> Vec<String> {
    let output = mount.run(&["diff", "--json", branch], &[]);
    succeed(&output);
    let text = String::from_utf8(output.stdout).unwrap().replace("\\udc", "\\\\udc");
    lines(&serde_json::from_str(&text).unwrap())
}

fn lines(reply: &serde_json::Value) -> Vec<String> {
    let line = |change: &serde_json::Value| {
        let text = |key: &str| change[key].as_str().unwrap_or_default();
        let from = change["from"].as_str().map_or(String::new(), |from| format!("{from} => "));
        let aspects: Vec<&str> = change["aspects"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(serde_json::Value::as_str)
            .collect();
        let aspects = match aspects.join(" ") {
            none if none.is_empty() => none,
            some => format!(" ({some})"),
        };
        format!("{} {from}{}{aspects}", text("change"), text("path"))
    };
    reply["changes"].as_array().unwrap().iter().map(line).collect()
}

const FILLED: &str = "
    mkdir -p d/sub kept e; echo one > d/one; echo two > d/sub/two; echo file > file; echo other > other
    ln -s file link; ln file hard; mkfifo pipe; echo in > kept/in; echo long content to find > found
";

#[test]
fn each_kind_of_change_is_reported() {
    for (script, wanted) in [
        ("echo x > new; mkdir dir", &["added dir", "added new"][..]),
        ("echo other! > other", &["modified other (content)"]),
        ("chmod 600 other", &["metadata other (mode)"]),
        (
            "echo x > other; chmod 700 other; chown 1:1 other",
            &["modified other (content mode owner)"],
        ),
        ("touch other", &["metadata other (times)"]),
        ("rm other", &["deleted other"]),
        ("rm -r d", &["deleted d", "deleted d/one", "deleted d/sub", "deleted d/sub/two"]),
        ("mv other moved", &["renamed other => moved"]),
        ("mv other moved; echo x >> moved", &["renamed other => moved (content)"]),
        ("mv d e/g", &["renamed d => e/g"]),
        (
            "mv d g; echo x > g/one; mv g/sub h",
            &["renamed d => g", "modified g/one (content)", "renamed d/sub => h"],
        ),
        ("mv d g; mkdir d; echo x > d/x", &["added d", "added d/x", "renamed d => g"]),
        ("mv d x; mv e d; mv x e", &["renamed e => d", "renamed d => e"]),
        ("cp -p found copied; rm found", &["renamed found => copied"]),
        ("rm other; mkdir other; echo x > other/x", &["type other", "added other/x"]),
        ("rm -r d; ln -s e d", &["type d", "deleted d/one", "deleted d/sub", "deleted d/sub/two"]),
        ("ln -sf other link", &["modified link (content)"]),
        ("rm pipe; mknod pipe c 1 3", &["type pipe"]),
        ("mknod null c 1 3; mknod sda b 8 0", &["added null", "added sda"]),
        ("chmod 700 d", &["metadata d (mode)"]),
        ("chmod 700 .", &["metadata . (mode)"]),
        // One object has two names.
        ("echo x > hard", &["modified file (content)", "modified hard (content)"]),
        // What is put back is no change.
        ("mv other o; mv o other; echo x > n; rm n; mkdir n; rmdir n", &[]),
        ("cp -rp d x; rm -r d; mv x d", &[]),
        ("rm -r d; mkdir d", &["deleted d/one", "deleted d/sub", "deleted d/sub/two"]),
    ] {
        let mount = Mount::over(|base| shell(base, FILLED));
        let branch = mount.create("branch");
        shell(&branch, script);
        assert_eq!(listed(&mount, "branch"), wanted, "{script}");
    }
}

#[test]
fn extended_attributes_are_reported() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let branch = mount.create("branch");
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(branch.join("other"), "user.note", b"value", flags).unwrap();
    rustix::fs::setxattr(branch.join("d"), "user.note", b"value", flags).unwrap();
    assert_eq!(listed(&mount, "branch"), ["metadata d (xattrs)", "metadata other (xattrs)"]);
}

#[test]
fn a_nested_branch_is_compared_with_its_parent_as_at_the_fork() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let parent = mount.create("parent");
    shell(&parent, "echo x > new; rm other; mv d moved; echo x > moved/one");
    let child = mount.create_below("parent", "child");
    assert_eq!(listed(&mount, "child"), [] as [&str; 0]);
    shell(&child, "echo y >> new; echo z > other; mv moved/sub sub; mv moved again; rm again/one");
    assert_eq!(
        listed(&mount, "child"),
        [
            "renamed moved => again",
            "deleted moved/one",
            "modified new (content)",
            "added other",
            "renamed moved/sub => sub"
        ]
    );
    // Once committed, the child's changes are the parent's: in two layers, compared with the base.
    mount.commit("child");
    assert_eq!(
        listed(&mount, "parent"),
        [
            "renamed d => again",
            "deleted d/one",
            "added new",
            "modified other (content)",
            "renamed d/sub => sub"
        ]
    );
}

#[test]
fn a_directory_below_one_that_the_parent_renamed_can_be_renamed_again() {
    let mount =
        Mount::over(|base| shell(base, "mkdir -p x/sub/deep; echo content > x/sub/deep/file"));
    let parent = mount.create("parent");
    shell(&parent, "mv x y");
    let child = mount.create_below("parent", "child");
    shell(
        &child,
        "mv y/sub z; test \"$(cat z/deep/file)\" = content; mv z/deep w; test \"$(cat w/file)\" = content",
    );
    assert_eq!(listed(&mount, "child"), ["renamed y/sub/deep => w", "renamed y/sub => z"]);
    mount.commit("child");
    assert_eq!(
        listed(&mount, "parent"),
        ["renamed x/sub/deep => w", "renamed x => y", "renamed x/sub => z"]
    );
    mount.commit("parent");
    assert_eq!(fs::read_to_string(mount.base().join("w/file")).unwrap(), "content\n");
}

#[test]
fn a_stale_branch_can_still_be_compared() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let (won, lost) = (mount.create("won"), mount.create("lost"));
    shell(&lost, "echo x > other");
    shell(&won, "echo x > new");
    mount.commit("won");
    assert_eq!(listed(&mount, "lost"), ["modified other (content)"]);
}

#[test]
fn main_and_unknown_branches_are_refused() {
    let mount = Mount::new();
    assert!(refusal(&mount.run(&["diff", "main"], &[])).contains("main has no parent"));
    assert!(refusal(&mount.run(&["diff", "nothing"], &[])).contains("there is no branch nothing"));
}

/// The patch of a branch, with how many changes it cannot carry.
fn patch(mount: &Mount, branch: &str) -> (Vec<u8>, usize) {
    let output = mount.run(&["diff", "--patch", branch], &[]);
    succeed(&output);
    let remarks = output.stdout.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"# "));
    let count = remarks.count();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(told.contains("cannot be represented in a patch"), count > 0, "{told}");
    (output.stdout, count)
}

/// Applies a patch to a directory outside of any repository.
fn apply(directory: &Path, patch: &[u8], options: &[&str]) {
    let file = directory.with_extension("patch");
    fs::write(&file, patch).unwrap();
    let output = Command::new("git")
        .args(["-c", "core.fileMode=true", "apply", "--allow-empty", "--whitespace=nowarn"])
        .args(options)
        .arg(&file)
        .current_dir(directory)
        .env("GIT_CEILING_DIRECTORIES", directory.parent().unwrap())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}\n{}", String::from_utf8_lossy(patch));
}

/// What git keeps of a tree: files, whether they are executable, and symbolic links.
fn as_git_sees(root: &Path) -> BTreeMap<PathBuf, (bool, Content)> {
    let kept = |content: &Content| matches!(content, Content::File(_) | Content::Link(_));
    let is_executable = |mode: u32| mode & 0o170_100 == 0o100_100;
    snapshot(root)
        .into_iter()
        .filter(|(_, object)| kept(&object.content))
        .map(|(path, object)| (path, (is_executable(object.mode), object.content)))
        .collect()
}

/// The patch turns a copy of the base into the branch, and back.
fn assert_patch_is_exact(mount: &Mount, branch: &str, left_out: Option<usize>, when: &str) {
    let copy = mount.directory.path().join(format!("copy-of-{branch}"));
    let parts = [mount.base().join("."), copy.clone()];
    let copied = Command::new("cp").arg("-a").args(parts).output().unwrap();
    succeed(&copied);
    let _ = fs::remove_dir_all(copy.join(".branching"));
    let (patch, count) = patch(mount, branch);
    if let Some(left_out) = left_out {
        assert_eq!(count, left_out, "{when}\n{}", String::from_utf8_lossy(&patch));
    }
    apply(&copy, &patch, &[]);
    let text = String::from_utf8_lossy(&patch);
    assert_eq!(as_git_sees(&copy), as_git_sees(&mount.branch(branch)), "{when}\n{text}");
    // Git cannot take back a change of type, its own patches neither: it creates first and removes then.
    if !has_type_change(mount, branch) {
        apply(&copy, &patch, &["--reverse"]);
        assert_eq!(as_git_sees(&copy), as_git_sees(&mount.base()), "{when}, back\n{text}");
    }
    fs::remove_dir_all(&copy).unwrap();
}

/// Whether a name stands for a file here and for a symbolic link there.
fn has_type_change(mount: &Mount, branch: &str) -> bool {
    let (before, after) = (as_git_sees(&mount.base()), as_git_sees(&mount.branch(branch)));
    let is_link = |content: &Content| matches!(content, Content::Link(_));
    before.iter().any(|(path, (_, content))| {
        after.get(path).is_some_and(|(_, other)| is_link(content) != is_link(other))
    })
}

#[test]
fn git_applies_the_patch_of_every_kind_of_change_and_takes_it_back() {
    for (script, left_out) in [
        ("echo x > new; printf 'no newline' > short; : > empty", 0),
        ("printf 'one\\ntwo\\n' > d/one; : > file", 0),
        ("printf 'now without' > other", 0),
        ("chmod 755 other", 0),
        ("chmod 755 other; echo x >> other; mv other o", 0),
        ("rm other d/one; rm -r d/sub", 0),
        ("mv d e/g; echo x >> e/g/one; mv e/g/sub h", 0),
        ("mv found 'with blank'; echo x > 'also blank'", 0),
        ("head -c 100000 /dev/urandom > binary; printf 'a\\0b' > nul", 0),
        ("printf '\\0' >> other", 0),
        ("rm file; ln -s other file; ln -sf d/one link", 0),
        ("rm link; echo a file > link", 0),
        ("rm other; mkdir other; echo x > other/x", 0),
        ("rm -r kept; echo x > kept", 0),
        (
            "mkdir empty; chmod 700 d; mknod null c 1 3; chown 1 other; touch found; chmod 4755 file",
            7,
        ),
        ("rmdir e; rm pipe", 2),
        ("printf 'a\\r\\nb\\r\\n' > crlf; printf '\\xff\\xfe text\\n' > latin", 0),
    ] {
        let mount = Mount::over(|base| shell(base, FILLED));
        shell(&mount.create("branch"), script);
        assert_patch_is_exact(&mount, "branch", Some(left_out), script);
    }
}

#[test]
fn names_that_are_no_text_survive_a_patch() {
    let names: [&[u8]; 6] =
        [b"new\nline", b"\xff\xfe", b"quo\"te", b"back\\slash", b"tab\t", b" b a "];
    let mount = Mount::over(|base| {
        for name in names {
            fs::write(base.join(OsStr::from_bytes(name)), "content of some length\n").unwrap();
        }
    });
    let branch = mount.create("branch");
    for (position, name) in names.iter().enumerate() {
        let old = branch.join(OsStr::from_bytes(name));
        match position % 3 {
            0 => fs::rename(&old, branch.join(OsStr::from_bytes(&[name, &b" \xe9"[..]].concat())))
                .unwrap(),
            1 => fs::write(&old, "other\n").unwrap(),
            _ => fs::remove_file(&old).unwrap(),
        }
        let new = [&b"dir\n/"[..], name].concat();
        fs::create_dir_all(branch.join(OsStr::from_bytes(b"dir\n"))).unwrap();
        symlink(OsStr::from_bytes(name), branch.join(OsStr::from_bytes(&new))).unwrap();
    }
    assert_patch_is_exact(&mount, "branch", Some(0), "odd names");
    let shown = listed(&mount, "branch");
    assert!(shown.contains(&"deleted quo\"te".to_owned()), "{shown:?}");
    assert!(shown.iter().any(|line| line.contains("\\udcff\\udcfe")), "{shown:?}");
}

#[test]
fn a_file_too_large_to_compare_by_lines_is_binary() {
    let mount = Mount::over(|base| fs::write(base.join("large"), vec![b'x'; 17 << 20]).unwrap());
    let branch = mount.create("branch");
    let file = fs::OpenOptions::new().append(true).open(branch.join("large")).unwrap();
    std::io::Write::write_all(&mut &file, b"more\n").unwrap();
    drop(file);
    assert_patch_is_exact(&mount, "branch", Some(0), "a large file");
}

/// Goal: no sequence of changes makes a patch that is not exact. Method: random work in nested branches that are
/// committed into each other (so that layers, redirects and whiteouts pile up); after each round the patch is applied to
/// a copy of the base, compared with what the branch shows, and taken back.
#[test]
fn random_work_gives_exact_patches() {
    for seed in [2, 3, 5] {
        let mut random = Random(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed));
        let mount = Mount::over(|base| {
            shell(
                base,
                "mkdir -p a/b/c d/a; for f in a/x a/b/x a/b/c/x d/x d/a/x y; do echo $f > $f; done",
            );
        });
        let top = mount.create("top");
        let mut all = String::new();
        for round in 0..4 {
            let nested = round % 2 == 1;
            let place = if nested { mount.create_below("top", "nested") } else { top.clone() };
            let mut script = String::new();
            for _ in 0..8 {
                let mut path = || {
                    const NAMES: [&str; 5] = ["a", "b", "c", "d", "x"];
                    let depth = 1 + random.below(3);
                    (0..depth).map(|_| NAMES[random.below(5)]).collect::<Vec<_>>().join("/")
                };
                let (one, other) = (path(), path());
                script.push_str(&match random.below(8) {
                    0 | 1 => format!("mkdir -p {one}"),
                    2 => format!("echo {one} {round} >> {one}"),
                    3 => format!("rm -rf {one}"),
                    4 => format!("ln -sfn {other} {one}"),
                    _ => format!("mv -T {one} {other}"),
                });
                script.push_str(" 2>/dev/null || :\n");
            }
            shell(&place, &script);
            all.push_str(&script);
            all.push_str("----\n");
            let when = format!("seed {seed}, round {round}:\n{script}");
            if nested {
                let before = snapshot(&place);
                mount.commit("nested");
                common::assert_same(&snapshot(&top), &before, &when);
            }
            assert_patch_is_exact(&mount, "top", None, &when);
        }
        let wanted = snapshot(&top);
        let committed = mount.run(&["commit", "top"], &[]);
        let told = String::from_utf8_lossy(&committed.stderr);
        assert!(committed.status.success(), "seed {seed}: {told}\n{all}");
        common::assert_same(&snapshot(&mount.base()), &wanted, &format!("seed {seed}, the commit"));
    }
}

/// What a commit tells is what the diff told, renames too.
#[test]
fn a_commit_lists_what_a_diff_does() {
    const SCRIPT: &str = "mv other moved; mkdir new; mv d/one new/one; mv link new/link; mv hard twin; echo x >> found
        mv kept kept2; rm pipe; mv e e2; mv file e2/file; echo fresh > other2; mv other2 fresh";
    let mount = Mount::over(|base| shell(base, FILLED));
    shell(&mount.create("one"), SCRIPT);
    mount.create("outer");
    shell(&mount.create_below("outer", "inner"), SCRIPT);
    let ask = |verb: &str, branch: &str, dry_run: bool| {
        let mut request = serde_json::json!({"v": 1, "verb": verb, "dry_run": dry_run});
        if !branch.is_empty() {
            request["branch"] = branch.into();
        }
        lines(&mount.request(&request))
    };
    let of_diff = |name: &str| -> Vec<String> {
        let lines = listed(&mount, name);
        lines.iter().map(|line| line.split(" (").next().unwrap().to_owned()).collect()
    };
    let told = of_diff("one");
    assert!(told.contains(&"renamed d/one => new/one".to_owned()), "{told:?}");
    for name in ["one", "inner"] {
        assert_eq!(of_diff(name), told, "{name}");
        assert_eq!(ask("commit", name, true), told, "{name}");
    }
    mount.abort("outer");
    assert_eq!(ask("commit", "one", false), told);
    let undone = ask("undo", "", true);
    assert!(undone.contains(&"renamed new/one => d/one".to_owned()), "{undone:?}");
    assert_eq!(undone.len(), told.len());
}
