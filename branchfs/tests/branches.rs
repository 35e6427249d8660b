//! The promises of docs/semantics.md, on a real mount.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::process::Command;
use std::time::Duration;

use rustix::fs::inotify;
use serde_json::json;

use common::{
    Mount, assert_same, refusal, shell, snapshot, snapshot_by_names, succeed, wait_for_the_clock,
};

/// S2: the parent as it was at the fork, and one's own changes.
/// The kernel doubles the table when it is full, and a thread waits for that, 10 ms.
/// Others work in the base while it is mounted: `git checkout` removes directories and makes them again.
const REPLACEMENTS: [&str; 4] = [
    "rm -r d; mkdir -p d/in; echo new >d/in/file",
    "mv d old; mkdir -p d/in; echo new >d/in/file",
    "mv d/in d/old; mkdir d/in; echo new >d/in/file",
    "mkdir -p e/in; echo new >e/in/file; mv d f; mv e d",
];

fn with_a_directory() -> Mount {
    Mount::over(|base| shell(base, "mkdir -p d/in; echo old >d/in/file"))
}

#[test]
fn directories_that_others_replace_are_shown_as_they_are() {
    for replacement in REPLACEMENTS {
        let mount = with_a_directory();
        let before = mount.create("before");
        for root in [mount.mountpoint(), before] {
            assert_eq!(fs::read_to_string(root.join("d/in/file")).unwrap(), "old\n");
        }
        shell(&mount.base(), replacement);
        for root in [mount.mountpoint(), mount.create("after")] {
            let file = fs::read_to_string(root.join("d/in/file")).unwrap();
            assert_eq!(file, "new\n", "{replacement}");
            let mut listed = fs::read_dir(root.join("d/in")).unwrap().flatten();
            assert!(listed.all(|entry| entry.metadata().is_ok()), "{replacement}");
        }
        fs::write(mount.branch("after").join("d/in/branch"), "branch").unwrap();
        mount.commit("after");
        let written = fs::read_to_string(mount.base().join("d/in/branch")).unwrap();
        assert_eq!(written, "branch", "{replacement}");
    }
}

/// The files in it are older than the fork: only its place is new.
#[test]
fn a_directory_that_others_moved_into_one_that_the_branch_removed_is_not_lost() {
    for (removed, target) in
        [("rm -r d", "d/moved"), ("rm -r d", "d/in/moved"), ("rm -r d; mkdir d", "d/in/moved")]
    {
        let mount =
            Mount::over(|base| shell(base, "mkdir -p d/in theirs/deep; echo x >theirs/deep/file"));
        shell(&mount.create("work"), removed);
        wait_for_the_clock(&mount.base());
        shell(&mount.base(), &format!("mv theirs {target}"));
        let before = snapshot(&mount.base());
        let said = refusal(&mount.run(&["commit", "work"], &[]));
        assert!(said.contains(target), "{removed}, {target}: {said}");
        assert_same(&snapshot(&mount.base()), &before, target);
        succeed(&mount.run(&["commit", "--force", "work"], &[]));
        assert!(!mount.base().join(target).exists());
    }
}

#[test]
fn a_write_to_main_goes_where_its_path_leads_now() {
    for replacement in REPLACEMENTS {
        let mount = with_a_directory();
        let directory = mount.mountpoint().join("d/in");
        fs::write(directory.join("first"), "").unwrap();
        shell(&mount.base(), replacement);
        fs::write(directory.join("second"), "main").unwrap();
        let written = fs::read_to_string(mount.base().join("d/in/second")).unwrap();
        assert_eq!(written, "main", "{replacement}");
    }
}

#[test]
fn the_table_of_open_files_is_large_from_the_start() {
    let mount = Mount::new();
    let status = fs::read_to_string(format!("/proc/{}/status", mount.daemon())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
    assert!(size.trim().parse::<usize>().unwrap() >= 4096, "{size}");
}

#[test]
fn a_branch_shows_its_parent_and_its_own_changes_and_never_a_siblings() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "base").unwrap());
    let (one, two) = (mount.create("one"), mount.create("two"));
    fs::write(one.join("file"), "one").unwrap();
    fs::write(one.join("new"), "one").unwrap();
    assert_eq!(fs::read_to_string(two.join("file")).unwrap(), "base");
    assert!(!two.join("new").exists());
    assert_eq!(
        fs::read_to_string(mount.base().join("file")).unwrap(),
        "base",
        "the base is untouched until the commit"
    );
}

/// S5: under `first-winner` the first child to commit wins.
#[test]
fn the_first_commit_wins_and_siblings_are_stale() {
    // A file that was just written is open for the kernel a moment longer, which would read it by itself then.
    let mount = Mount::over(|base| fs::write(base.join("open"), "content").unwrap());
    let (one, two) = (mount.create("one"), mount.create("two"));
    fs::write(two.join("change"), "lost").unwrap();
    let mut open = fs::File::open(two.join("open")).unwrap();
    fs::write(one.join("file"), "won").unwrap();
    mount.commit("one");
    let stale =
        |error: std::io::Error| assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}");
    stale(fs::read_dir(&two).unwrap_err());
    stale(fs::write(two.join("late"), "").unwrap_err());
    stale(fs::read(two.join("open")).unwrap_err());
    if common::driver() == "fuse" {
        stale(open.read(&mut [0; 8]).unwrap_err());
    } else {
        open.read_exact(&mut [0; 7]).unwrap(); // the kernel keeps what is open, away from every path
    }
    assert!(refusal(&mount.run(&["commit", "two"], &[])).contains("a sibling was committed first"));
    mount.abort("two");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "won");
}

#[test]
fn a_record_that_the_power_emptied_is_a_branch_that_never_was() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "base").unwrap());
    mount.create("kept");
    mount.create("lost");
    mount.kill();
    let log = mount.base().join(".branching/branches/log");
    let mut records = fs::read(&log).unwrap();
    let last = records[..records.len() - 1].iter().rposition(|byte| *byte == b'\n').unwrap();
    records[last + 1..].fill(0);
    fs::write(&log, records).unwrap();
    mount.mount();
    assert!(mount.branch("kept").exists() && !mount.branch("lost").exists());
    fs::write(mount.create("lost").join("file"), "again").unwrap();
    mount.commit("kept");
    let layers = fs::read_dir(mount.base().join(".branching/layers")).unwrap();
    assert_eq!(layers.count(), 1, "that of the new branch");
}

/// Only `.branching` in the root is reserved, not what begins with it.
#[test]
fn names_that_resemble_the_stores_are_ordinary_names() {
    const NAMES: [&str; 5] = [
        ".branching-stage-1",
        ".branching-stage-notes",
        ".branching2",
        ".branching.toml",
        ".branch",
    ];
    let mount = Mount::over(|base| {
        for name in NAMES {
            fs::write(base.join(name), "base").unwrap();
        }
    });
    let before = snapshot(&mount.base());
    let branch = mount.create("branch");
    assert_same(&snapshot(&branch), &before, "before a change");
    for name in NAMES {
        fs::write(branch.join(name), "changed").unwrap();
        fs::write(branch.join(format!("{name}-file")), "new").unwrap();
        fs::create_dir_all(branch.join(format!("{name}-directory/below"))).unwrap();
    }
    fs::remove_file(branch.join(NAMES[0])).unwrap();
    let wanted = snapshot(&branch);
    assert_eq!(wanted.len(), 4 * NAMES.len());
    let diff = String::from_utf8(mount.run(&["diff", "branch"], &[]).stdout).unwrap();
    for name in NAMES {
        assert!(diff.contains(&format!("{name}\n")), "{name} in: {diff}");
    }
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "committed");
    succeed(&mount.run(&["undo"], &[]));
    assert_same(&snapshot(&mount.base()), &before, "undone");
}

/// As `cp -al`, uv and pnpm make them, and as a commit leaves them that removed one of two names: the history has the other.
#[test]
fn a_file_with_a_hard_link_outside_of_the_base_is_committed_as_any_other() {
    const CHANGES: [&str; 8] = [
        "echo changed > f",
        "chmod 600 f",
        "rm f",
        "echo changed > f; rm f",
        "mv f d/g; echo more >> d/g",
        "ln f g; echo more >> g; rm f",
        "echo changed > in; rm in",
        "echo changed > s; rm l; ln -s f new",
    ];
    const OPTIONS: [&[&str]; 4] = [&[], &["--force"], &["--exclude", "none"], &["remount"]];
    let mount = Mount::over(|base| {
        let outside = base.with_file_name("outside");
        fs::create_dir(&outside).unwrap();
        shell(
            base,
            "mkdir d; echo base > f; echo base > in; ln in d/in; echo base > s; ln s d/s; ln -s x l",
        );
        shell(&outside, "ln ../base/f f; ln -P ../base/l l");
    });
    let outside = mount.base().with_file_name("outside");
    shell(&mount.create("earlier"), "rm d/s");
    mount.commit("earlier");
    let (base, untouched) = (snapshot_by_names(&mount.base()), snapshot_by_names(&outside));
    for (change, options) in CHANGES.iter().zip(OPTIONS.iter().cycle()) {
        let branch = mount.create("branch");
        shell(&branch, change);
        let wanted = snapshot_by_names(&branch);
        let options = if *options == ["remount"] {
            mount.unmount();
            mount.mount();
            assert_same(&snapshot_by_names(&branch), &wanted, change);
            &[]
        } else {
            *options
        };
        succeed(&mount.run(&[&["commit"], options, &["branch"]].concat(), &[]));
        assert_same(&snapshot_by_names(&mount.base()), &wanted, change);
        assert_same(&snapshot_by_names(&outside), &untouched, change);
        succeed(&mount.run(&["undo"], &[]));
        assert_same(&snapshot_by_names(&mount.base()), &base, change);
    }
}

/// S5: only a commit that changes something.
#[test]
fn a_commit_that_changes_nothing_ends_its_branch_and_nothing_else() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "old").unwrap());
    fs::write(mount.create("work").join("new"), "").unwrap();
    mount.commit("work");
    let kept = mount.create("kept");
    fs::write(kept.join("file"), "hours of work").unwrap();
    mount.create("untouched");
    shell(&mount.create("cleaned"), "touch scratch; mkdir d; rm -r scratch d");
    let history = mount.ask("history");
    for name in ["untouched", "cleaned"] {
        let reply = mount.request(&json!({"v": 1, "verb": "commit", "branch": name}));
        assert_eq!(reply["changes"], json!([]), "{name}");
        assert_eq!(reply["stale"], json!([]), "{name}");
    }
    assert_eq!(mount.ask("history"), history, "the history is as before");
    assert_eq!(mount.ask("list")["branches"].as_array().unwrap().len(), 1);
    mount.commit("kept");
    assert_eq!(fs::read(mount.base().join("file")).unwrap(), b"hours of work");
}

#[test]
fn a_commit_of_the_topmost_directorys_attributes_alone_is_one() {
    let mount = Mount::new();
    shell(&mount.create("main's"), "chmod 711 .");
    mount.commit("main's");
    assert_eq!(fs::metadata(mount.base()).unwrap().mode() & 0o777, 0o711);
    mount.create("outer");
    shell(&mount.create_below("outer", "inner"), "chmod 700 .");
    mount.commit("inner");
    assert_eq!(fs::metadata(mount.branch("outer")).unwrap().mode() & 0o777, 0o700);
    assert_eq!(mount.ask("history")["entries"].as_array().unwrap().len(), 1);
}

#[test]
fn a_nested_commit_that_changes_nothing_leaves_its_siblings_alive() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "old").unwrap());
    mount.create("outer");
    mount.create_below("outer", "untouched");
    fs::write(mount.create_below("outer", "kept").join("file"), "new").unwrap();
    mount.commit("untouched");
    mount.commit("kept");
    mount.commit("outer");
    assert_eq!(fs::read(mount.base().join("file")).unwrap(), b"new");
}

#[test]
fn a_stale_branch_without_changes_can_be_committed_and_one_with_changes_cannot() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "old").unwrap());
    mount.create("reader");
    fs::write(mount.create("loser").join("file"), "lost").unwrap();
    fs::write(mount.create("winner").join("file"), "won").unwrap();
    mount.commit("winner");
    mount.commit("reader");
    let said = refusal(&mount.run(&["commit", "loser"], &[]));
    assert!(said.contains("a sibling was committed first"), "{said}");
    assert_eq!(fs::read(mount.base().join("file")).unwrap(), b"won");
}

/// S3: changes in a branch with live children answer EROFS.
#[test]
fn a_branch_with_live_children_is_frozen_until_they_are_gone() {
    let mount = Mount::new();
    let parent = mount.create("parent");
    fs::write(parent.join("file"), "parent").unwrap();
    let child = mount.create_below("parent", "child");
    let frozen = fs::write(parent.join("file"), "late").unwrap_err();
    assert_eq!(frozen.raw_os_error(), Some(libc::EROFS));
    assert_eq!(
        fs::write(mount.mountpoint().join("main"), "").unwrap_err().raw_os_error(),
        Some(libc::EROFS)
    );
    assert!(refusal(&mount.run(&["commit", "parent"], &[])).contains("live children (child)"));
    fs::write(child.join("file"), "child").unwrap();
    mount.commit("child");
    assert_eq!(fs::read_to_string(parent.join("file")).unwrap(), "child");
    fs::write(parent.join("after"), "thawed").unwrap();
    mount.commit("parent");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "child");
    assert_eq!(fs::read_to_string(mount.base().join("after")).unwrap(), "thawed");
}

/// S4: a commit carries everything.
#[test]
fn nested_commits_carry_every_kind_of_change_through_the_stack() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p a/b gone keep; echo 1 > a/b/f; echo 2 > a/g; echo 3 > gone/x; echo 4 > keep/y; ln -s f link",
        );
    });
    let parent = mount.create("parent");
    shell(
        &parent,
        "mkdir new; echo p > new/p; mv a moved; echo changed > moved/g; rm -r gone; echo y2 > keep/y",
    );
    let child = mount.create_below("parent", "child");
    shell(
        &child,
        "mv new newer; echo c > newer/c; rm newer/p; mkdir gone; echo again > gone/z; mv moved/b b; echo 5 > b/f; rm keep/y link",
    );
    let wanted = snapshot(&child);
    mount.commit("child");
    assert_same(&snapshot(&parent), &wanted, "in the parent");
    mount.unmount();
    mount.mount();
    assert_same(&snapshot(&parent), &wanted, "after a remount");
    mount.commit("parent");
    assert_same(&snapshot(&mount.base()), &wanted, "in the base");
}

#[test]
fn a_nested_branch_that_moves_what_its_parent_moved_or_made_loses_nothing() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p d/e/x q/r; echo 1 > d/e/f; echo 1 > d/e/x/f; echo 1 > q/r/f; mkdir -p t/u; echo 1 > t/u/f",
        );
    });
    let parent = mount.create("parent");
    shell(
        &parent,
        "mkdir made q/new; echo 2 > made/f; mv d/e d/E; mv d D; echo 2 > D/E/x/g; echo 2 > q/r/g; mv q Q
         mv t T; mkdir -p t/u; echo other > t/u/other",
    );
    let child = mount.create_below("parent", "child");
    shell(
        &child,
        "mkdir new; mv made new/made; mv D/E E; mv E/x new/x; mv Q/r r; mv Q/new r/new; echo 3 > r/new/f; echo 3 > new/x/h; echo 3 > new/made/g; rm r/g; mv T/u u; mv t/u v",
    );
    let wanted = snapshot(&child);
    mount.unmount();
    mount.mount();
    assert_same(&snapshot(&child), &wanted, "after a remount");
    mount.commit("child");
    assert_same(&snapshot(&parent), &wanted, "in the parent");
    let before = snapshot(&mount.base());
    mount.commit("parent");
    assert_same(&snapshot(&mount.base()), &wanted, "in the base");
    common::succeed(&mount.run(&["undo"], &[]));
    assert_same(&snapshot(&mount.base()), &before, "after the undo");
    common::succeed(&mount.run(&["redo"], &[]));
    assert_same(&snapshot(&mount.base()), &wanted, "after the redo");
}

/// S8: what others changed in the base is listed, and nothing is committed.
#[test]
fn a_commit_never_overwrites_what_others_changed_unless_forced() {
    let mount = Mount::over(|base| shell(base, "echo 1 > file; mkdir gone; echo 2 > gone/x"));
    let branch = mount.create("branch");
    shell(&branch, "echo mine > file; rm -r gone; echo new > new");
    std::thread::sleep(Duration::from_millis(20));
    shell(&mount.base(), "echo theirs > file; echo theirs > gone/y; echo theirs > new");
    let before = snapshot(&mount.base());
    let refused = refusal(&mount.run(&["commit", "branch"], &[]));
    for path in ["file", "gone/y", "new"] {
        assert!(refused.contains(&format!("\n  {path}\n")), "{path} is named in: {refused}");
    }
    assert_same(&snapshot(&mount.base()), &before, "nothing was committed");
    common::succeed(&mount.run(&["commit", "--force", "branch"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "mine\n");
    assert!(!mount.base().join("gone").exists());
}

#[test]
fn a_file_that_is_being_written_is_not_committed() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let mut file = fs::File::create(branch.join("busy")).unwrap();
    file.write_all(b"half").unwrap();
    assert!(refusal(&mount.run(&["commit", "branch"], &[])).contains("\n  busy\n"));
    file.write_all(b" and half").unwrap();
    drop(file);
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("busy")).unwrap(), "half and half");
}

/// S10: an abort returns at once, and gives space back in the background.
#[test]
fn an_abort_leaves_no_trace() {
    let mount = Mount::over(|base| {
        shell(base, "mkdir d; for i in $(seq 200); do echo $i > d/$i; done; touch -d 2001-01-01 .")
    });
    let before = snapshot(&mount.base());
    let branch = mount.create("branch");
    shell(&branch, "rm -r d; mkdir d; echo x > d/x; chmod 700 .");
    mount.abort("branch");
    assert!(!branch.exists());
    mount.unmount();
    assert_same(&snapshot(&mount.base()), &before, "after the abort");
    assert!(!mount.base().join(".branching").exists());
}

/// S11: branches survive the daemon.
#[test]
fn branches_survive_a_killed_daemon() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "base").unwrap());
    let branch = mount.create("kept");
    fs::write(branch.join("file"), "changed").unwrap();
    fs::write(branch.join("new"), "new").unwrap();
    let ino = fs::metadata(branch.join("file")).unwrap().ino();
    mount.kill();
    mount.mount();
    assert_eq!(fs::read_to_string(branch.join("file")).unwrap(), "changed");
    assert_eq!(
        fs::metadata(branch.join("file")).unwrap().ino(),
        ino,
        "the inode number shown stays"
    );
    mount.commit("kept");
    assert_eq!(fs::read_to_string(mount.base().join("new")).unwrap(), "new");
}

/// S9: entirely old or entirely new.
#[test]
fn a_commit_that_is_killed_leaves_the_base_old_or_new() {
    let fill = |base: &std::path::Path| {
        shell(base, "mkdir old; for i in $(seq 300); do echo $i > old/$i; echo $i > f$i; done")
    };
    let work =
        "rm -r old; mkdir new; for i in $(seq 300); do echo new$i > f$i; echo $i > new/$i; done";
    let mut outcomes = [0, 0];
    let rounds = common::rounds(8, 24) as u64;
    for round in 0..rounds {
        let mount = Mount::over(fill);
        let before = snapshot(&mount.base());
        let branch = mount.create("branch");
        shell(&branch, work);
        let after = snapshot(&branch);
        let mut commit = Command::new(common::PROGRAM);
        commit.args(["commit", "branch"]).arg(mount.mountpoint());
        let mut commit = commit
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(16_800 / rounds * round));
        mount.kill();
        commit.wait().unwrap();
        mount.mount();
        let found = snapshot(&mount.base());
        if found.contains_key(std::path::Path::new("new")) {
            assert_same(&found, &after, &format!("round {round}: new"));
            outcomes[1] += 1;
        } else {
            assert_same(&found, &before, &format!("round {round}: old"));
            assert_same(
                &snapshot(&branch),
                &after,
                &format!("round {round}: the branch is still there"),
            );
            outcomes[0] += 1;
        }
    }
    println!("old {}, new {}", outcomes[0], outcomes[1]);
}

/// S13: no name, link or race leads out of the base.
#[test]
fn nothing_in_a_branch_reaches_out_of_the_base() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, "outside").unwrap();
    let mount = Mount::over(|base| {
        symlink(outside.path(), base.join("door")).unwrap();
        fs::create_dir(base.join("room")).unwrap();
        fs::write(base.join("room/secret"), "inside").unwrap();
    });
    let branch = mount.create("branch");
    fs::write(branch.join("room/secret"), "changed").unwrap();
    fs::write(branch.join("room/new"), "new").unwrap();
    // Between the work and the commit the directory becomes a link that leads out.
    fs::rename(mount.base().join("room"), mount.base().join("elsewhere")).unwrap();
    symlink(outside.path(), mount.base().join("room")).unwrap();
    refusal(&mount.run(&["commit", "branch"], &[]));
    // Forced, the branch's directory takes the place of the link itself.
    common::succeed(&mount.run(&["commit", "--force", "branch"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("room/new")).unwrap(), "new");
    assert_eq!(fs::read_to_string(&secret).unwrap(), "outside");
    assert!(!outside.path().join("new").exists());
}

#[test]
fn names_are_checked_and_branches_hidden_from_listings() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "").unwrap());
    for (name, reason) in [
        ("", "it is empty"),
        ("..", "it is the name of a directory itself"),
        ("main", "it is reserved for the root branch"),
        ("@x", "it begins with @"),
        ("a/b", "it contains a slash"),
        ("a\nb", "it contains a newline"),
        (&"x".repeat(255), "longer than 254 bytes"),
    ] {
        let refused = refusal(&mount.run(&["create", "--", name], &[]));
        assert!(refused.contains(reason), "{name:?}: {refused}");
    }
    mount.create("one");
    assert!(refusal(&mount.run(&["create", "one"], &[])).contains("is open already"));
    let names: Vec<_> =
        fs::read_dir(mount.mountpoint()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["file"]);
    assert!(!mount.branch("one").join(".branching").exists(), "the store is hidden");
}

#[test]
fn wrong_mounts_are_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base");
    fs::create_dir_all(base.join("inside")).unwrap();
    fs::create_dir(directory.path().join("mount")).unwrap();
    let mount = |base: &std::path::Path, extra: &[&str], at: &str| {
        let output = Command::new(common::PROGRAM)
            .args(["mount", "--base"])
            .arg(base)
            .args(extra)
            .arg(directory.path().join(at))
            .output()
            .unwrap();
        refusal(&output)
    };
    assert!(mount(&base, &[], "base/inside").contains("is inside the base"));
    assert!(mount(&base.join("absent"), &[], "mount").contains("cannot be used"));
    assert!(mount(&base, &[], "absent").contains("cannot be used"));
    let overlay = ["--driver", "overlay", "--control-files"];
    assert!(mount(&base, &overlay, "mount").contains("cannot show control files"));
    fs::create_dir(directory.path().join("full")).unwrap();
    fs::write(directory.path().join("full/file"), "somebody's").unwrap();
    let full = directory.path().join("full");
    let said = mount(&base, &["--store", full.to_str().unwrap()], "mount");
    assert!(said.contains("is not a store and not empty (it has file)"), "{said}");
    assert_eq!(fs::read_dir(&full).unwrap().count(), 1);
    assert!(!base.join(".branching").exists(), "nothing was made");
}

/// A process with a copy of a mount. It lets go of those of other tests, which would be held up.
struct Copies(std::process::Child);

impl Copies {
    fn new(mount: &Mount) -> Self {
        const SCRIPT: &str = r#"
            awk -v kept="$0" '$3 == "fuse.branchfs" && $2 != kept { print $2 }' /proc/self/mounts |
                while read -r other; do umount -l "$other"; done
            echo; exec sleep 1000"#;
        let mut other = Command::new("unshare")
            .args(["--mount", "sh", "-c", SCRIPT])
            .arg(mount.mountpoint())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 1];
        std::io::Read::read_exact(other.stdout.as_mut().unwrap(), &mut line).unwrap();
        Self(other)
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_copy_of_the_mount_in_another_namespace_holds_no_unmount_up_and_is_named() {
    let mount = Mount::new();
    shell(&mount.create("kept"), "echo kept >file");
    let copies = Copies::new(&mount);
    let named = format!("{} (", copies.0.id());
    let daemon = rustix::process::Pid::from_raw(mount.daemon()).unwrap();
    let waiter = rustix::process::pidfd_open(daemon, rustix::process::PidfdFlags::empty()).unwrap();
    let output = mount.run(&["unmount"], &[]);
    common::succeed(&output);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&named), "{said}");
    assert!(fs::read_dir(mount.mountpoint()).unwrap().next().is_none(), "here it is unmounted");
    let words = mount.mount_words(&[]);
    let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
    let said = refusal(&mount.run(&words, &[]));
    assert!(said.contains("in use by another mount") && said.contains(&named), "{said}");
    drop(copies);
    // Other tests of this program may have started processes that have a copy for a moment: what counts is that it ends.
    let mut poll = [rustix::event::PollFd::new(&waiter, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut poll, None).unwrap();
    mount.mount();
    shell(&mount.branch("kept"), "grep -qx kept file");
}

/// A sandbox that is being started has such a copy for a moment.
#[test]
fn a_mount_waits_for_a_copy_of_the_last_mount_that_goes() {
    let mount = Mount::new();
    shell(&mount.create("kept"), "echo kept >file");
    let copies = Copies::new(&mount);
    common::succeed(&mount.run(&["unmount", "--lazy"], &[]));
    let opens = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&opens, mount.store().join("lock"), inotify::WatchFlags::OPEN).unwrap();
    let mut next = Command::new(common::PROGRAM);
    let mut next = next.args(mount.mount_words(&[])).arg(mount.mountpoint()).spawn().unwrap();
    let mut poll = [rustix::event::PollFd::new(&opens, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut poll, None).unwrap(); // it tries to lock the store
    drop(copies);
    assert!(next.wait().unwrap().success());
    shell(&mount.branch("kept"), "grep -qx kept file");
}

#[test]
fn a_second_mount_is_refused_and_the_first_is_named() {
    let mount = Mount::new();
    let other = tempfile::tempdir().unwrap();
    let mut command = Command::new(common::PROGRAM);
    command.arg("mount").arg("--base").arg(mount.base()).arg(other.path());
    let said = refusal(&command.output().unwrap());
    let at = format!("(process {}, at {})", mount.daemon(), mount.mountpoint().display());
    assert!(said.contains(&at), "{said}");
}

#[test]
fn a_mount_that_is_not_permitted_says_what_is_missing_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (base, mountpoint) = (directory.path().join("base"), directory.path().join("mount"));
    fs::create_dir(&base).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    let before = snapshot(&base);
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_admin", common::PROGRAM, "mount", "--base"]);
    let output = command.arg(&base).arg(&mountpoint).output().unwrap();
    assert!(refusal(&output).contains("--cap-add SYS_ADMIN"));
    assert!(!base.join(".branching").exists());
    assert_same(&snapshot(&base), &before, "after the refusal");
}

/// S10 and S5: however much the kernel knows of the branch.
#[test]
fn a_big_branch_vanishes_immediately_when_it_is_aborted_or_a_sibling_wins() {
    const FILES: usize = 300;
    let mount = Mount::new();
    for end in ["abort", "commit"] {
        let branch = mount.create("big");
        fs::write(mount.create("other").join("winner"), "").unwrap();
        fs::create_dir(branch.join("room")).unwrap();
        for number in 0..FILES {
            fs::write(branch.join(format!("room/{number}")), "x").unwrap();
        }
        assert_eq!(snapshot(&branch).len(), FILES + 2); // the kernel knows all of it
        common::succeed(&mount.run(&[end, if end == "abort" { "big" } else { "other" }], &[]));
        for path in ["", "room", "room/7", "room/299", "room/absent"] {
            let found = fs::symlink_metadata(branch.join(path)).map(|_| ());
            let error = found.unwrap_err().raw_os_error();
            assert!(matches!(error, Some(libc::ENOENT | libc::ESTALE)), "{end}, {path}: {error:?}");
        }
        let _ = mount.run(&["abort", if end == "abort" { "other" } else { "big" }], &[]);
        mount.create("big"); // the name is free
        assert!(!mount.branch("big").join("room").exists());
        mount.abort("big");
    }
    mount.unmount();
    for kept in ["branches", "layers"] {
        assert_eq!(fs::read_dir(mount.base().join(".branching").join(kept)).unwrap().count(), 0);
    }
}

/// S1: a create makes no object, for its record is a line, or the few that the kernel mounts; what it makes depends
/// neither on the size of the tree nor on the number of branches.
#[test]
fn a_create_makes_no_object_or_the_same_few_whatever_there_is() {
    let made = |files: usize, branches: usize| {
        let mount = Mount::over(|base| {
            for number in 0..files {
                fs::write(base.join(number.to_string()), "x").unwrap();
            }
        });
        (0..branches).for_each(|number| drop(mount.create(&format!("branch-{number}"))));
        let objects = || {
            let mut find = Command::new("find");
            find.arg(mount.store()).arg("-print");
            find.output().unwrap().stdout.split(|byte| *byte == b'\n').count()
        };
        let before = objects();
        mount.create("one");
        objects() - before
    };
    let few = made(1, 0);
    assert!(few <= if common::driver() == "fuse" { 0 } else { 6 }, "{few} objects");
    assert_eq!((made(1000, 0), made(1, 20)), (few, few));
}
