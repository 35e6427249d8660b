//! S5: a stale branch can be rebased: it is forked again from the present state of its parent, with its changes on top.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;

use serde_json::json;

use common::mapping::{Mapping, Sharing};
use common::{Mount, assert_same, refusal, shell, snapshot, snapshot_by_names, succeed};

fn fill(base: &Path) {
    shell(
        base,
        "mkdir -p d moved/inner gone/below replaced
         echo old >f; echo old >d/g; echo old >d/h; echo old >moved/inner/file; echo old >moved/other
         echo old >gone/below/file; echo old >replaced/old; ln -s f link; ln d/h d/twin
         find . -exec touch -h -d '2020-01-01 00:00:00.123456789' {} +",
    );
}

/// A branch `late` with the changes of `work`, stale by a commit of `winner`.
fn stale(winner: &str, work: &str) -> Mount {
    let mount = Mount::over(fill);
    shell(&mount.create("late"), work);
    shell(&mount.create("winner"), winner);
    mount.commit("winner");
    assert_eq!(mount.ask("list")["branches"][0]["state"], "stale");
    mount
}

fn rebase(mount: &Mount, options: &[&str]) -> std::process::Output {
    mount.run(&[&["rebase"], options, &["late"]].concat(), &[])
}

fn plain(tree: &Path) -> impl PartialEq + std::fmt::Debug + use<> {
    let mut tree = snapshot_by_names(tree);
    tree.values_mut().for_each(|object| object.mtime = (0, 0)); // made at two times
    tree
}

const WINNERS: [&str; 4] = [
    "echo 1 >f; echo 1 >first; chmod 700 moved; chmod 711 .",
    "mkdir n; echo 1 >n/first; rm link",
    "chmod 600 f; mv f elsewhere",
    "rm f; echo 1 >d/first",
];
const WORKS: [&str; 5] = [
    "echo 2 >d/g; echo 2 >second",
    "rm -r gone; mkdir -p p/q; echo 2 >p/q/second",
    "mv moved/inner d/inner; echo more >>d/inner/file",
    "rm -r replaced; mkdir replaced; echo 2 >replaced/new; chmod 600 d/g",
    "echo 2 >>d/twin; chmod 750 d; rm d/g",
];

#[test]
fn changes_at_other_paths_come_on_top_of_what_was_committed() {
    for winner in WINNERS {
        for work in WORKS {
            let when = format!("{winner} | {work}");
            let wanted = tempfile::tempdir().unwrap();
            fill(wanted.path());
            shell(wanted.path(), &format!("{winner}; {work}"));
            let mount = stale(winner, work);
            succeed(&rebase(&mount, &[]));
            assert_eq!(plain(&mount.branch("late")), plain(wanted.path()), "{when}: the branch");
            mount.commit("late");
            assert_eq!(plain(&mount.base()), plain(wanted.path()), "{when}: the base");
            succeed(&mount.run(&["undo"], &[]));
            shell(wanted.path(), "rm -r *");
            fill(wanted.path());
            shell(wanted.path(), winner);
            assert_eq!(plain(&mount.base()), plain(wanted.path()), "{when}: undone");
        }
    }
}

/// The first, the second, and the path that stands against it.
const CREATED_BY_BOTH: [(&str, &str, Option<&str>); 9] = [
    ("mkdir n; echo 1 >n/a", "mkdir n; echo 2 >n/b", None),
    ("mkdir -p n/s; echo 1 >n/s/a", "mkdir -p n/s; echo 2 >n/s/b; mkdir n/t", None),
    ("mkdir -p d/n; echo 1 >d/n/a", "mkdir -p d/n; echo 2 >d/n/b; ln -s b d/n/l", None),
    ("mkdir n; echo 1 >n/a", "mkdir n n/b; mv moved/inner n/in", None),
    ("mkdir n; echo 1 >n/a", "mkdir n; echo 2 >n/a", Some("n/a")),
    ("mkdir n; echo 1 >n/a", "mkdir -p n/a; echo 2 >n/a/b", Some("n/a")),
    ("mkdir -p n/a; echo 1 >n/a/b", "mkdir n; echo 2 >n/a", Some("n/a")),
    ("mkdir n; chmod 700 n", "mkdir n; chmod 755 n; echo 2 >n/b", Some("n")),
    ("echo 1 >n", "mkdir n; echo 2 >n/b", Some("n")),
];

#[test]
fn a_directory_that_both_created_is_no_conflict_but_clashing_entries_are() {
    for policy in ["first-winner", "snapshot"] {
        for (first, second, path) in CREATED_BY_BOTH {
            let when = format!("{first} | {second} | {policy}");
            let mount = Mount::over(fill);
            shell(&mount.create("late"), second);
            shell(&mount.create("winner"), first);
            succeed(&mount.run(&["commit", "--policy", policy, "winner"], &[]));
            let before = plain(&mount.base());
            // Under snapshot no branch is stale, and nothing is rebased.
            let tried = mount.run(&["commit", "--policy", policy, "--rebase", "late"], &[]);
            if let Some(path) = path {
                let said = refusal(&tried);
                assert!(said.lines().any(|line| line.trim() == path), "{when}: {said}");
                assert_eq!(plain(&mount.base()), before, "{when}");
                continue;
            }
            succeed(&tried);
            let wanted = tempfile::tempdir().unwrap();
            fill(wanted.path());
            shell(wanted.path(), &format!("{first}; {}", second.replace("mkdir ", "mkdir -p ")));
            assert_eq!(plain(&mount.base()), plain(wanted.path()), "{when}: the base");
            succeed(&mount.run(&["undo"], &[]));
            assert_eq!(plain(&mount.base()), before, "{when}: undone");
            succeed(&mount.run(&["redo"], &[]));
            assert_eq!(plain(&mount.base()), plain(wanted.path()), "{when}: done again");
        }
    }
}

#[test]
fn a_branch_that_was_rebased_shows_what_others_have_in_a_directory_that_it_created() {
    let mount = stale("mkdir n; echo 1 >n/a", "mkdir n; echo 2 >n/b");
    succeed(&rebase(&mount, &[]));
    let late = mount.branch("late");
    assert_eq!(fs::read_to_string(late.join("n/a")).unwrap(), "1\n");
    fs::remove_file(late.join("n/a")).unwrap();
    mount.commit("late");
    assert!(!mount.base().join("n/a").exists());
    assert_eq!(fs::read_to_string(mount.base().join("n/b")).unwrap(), "2\n");
}

#[test]
fn paths_that_both_changed_are_listed_and_the_branch_stays_as_it_is() {
    let cases = [
        ("echo 1 >f", "echo 2 >f", "f"),
        ("chmod 600 f", "echo 2 >f", "f"),
        ("echo 1 >f", "chmod 600 f", "f"),
        ("echo 1 >new", "echo 2 >new", "new"),
        ("rm f", "echo 2 >>f", "f"),
        ("echo 1 >f", "rm f", "f"),
        ("rm -r gone", "echo 2 >gone/below/new", "gone"),
        ("echo 1 >gone/below/new", "rm -r gone", "gone/below/new"),
        ("mv moved there", "echo 2 >moved/new", "moved"),
        ("chmod 700 d", "chmod 711 d", "d"),
        ("echo 1 >replaced/new", "rm -r replaced; mkdir replaced", "replaced/new"),
    ];
    for (winner, work, path) in cases {
        let mount = stale(winner, work);
        let before = snapshot(&mount.base());
        for options in [&["--dry-run"][..], &[]] {
            let said = refusal(&rebase(&mount, options));
            let paths: Vec<&str> = said.lines().map(str::trim).collect();
            assert!(paths.contains(&path), "{winner} | {work}: {said}");
        }
        assert_eq!(mount.ask("list")["branches"][0]["state"], "stale", "{winner} | {work}");
        assert_same(&snapshot(&mount.base()), &before, "the base");
    }
}

#[test]
fn a_forced_rebase_keeps_the_branchs_version_of_conflicting_paths() {
    let mount = stale("echo 1 >f; echo 1 >d/g; rm d/h", "echo 2 >f; chmod 600 d/g");
    assert!(refusal(&rebase(&mount, &[])).contains("--force"));
    let forced = rebase(&mount, &["--force"]);
    succeed(&forced);
    assert_eq!(String::from_utf8_lossy(&forced.stdout), "d/g\nf\n");
    mount.commit("late");
    shell(&mount.base(), "test \"$(cat f)\" = 2; test \"$(stat -c %a d/g)\" = 600; test ! -e d/h");
}

#[test]
fn a_commit_can_rebase_first_and_leave_conflicting_paths_out() {
    let mount = stale("echo 1 >f", "echo 2 >f; echo 2 >second");
    assert!(refusal(&mount.run(&["commit", "late"], &[])).contains("--rebase"));
    let said = refusal(&mount.run(&["commit", "--rebase", "late"], &[]));
    assert!(said.lines().any(|line| line.trim() == "f"), "{said}");
    succeed(&mount.run(&["commit", "--rebase", "--skip", "late"], &[]));
    shell(&mount.base(), "test \"$(cat f second)\" = $'1\\n2'");
    let mount = stale("echo 1 >f", "echo 2 >second");
    let reply = mount.request(
        &json!({"v": 1, "verb": "commit", "branch": "late", "rebase": true, "dry_run": true}),
    );
    assert_eq!(reply["changes"][0]["path"], "second");
    assert_eq!(mount.ask("list")["branches"][0]["state"], "stale", "a dry run changes nothing");
    succeed(&mount.run(&["commit", "--rebase", "late"], &[]));
    shell(&mount.base(), "test \"$(cat f second)\" = $'1\\n2'");
}

#[test]
fn a_branch_is_stale_again_after_a_rebase_when_another_one_wins() {
    let mount = stale("echo 1 >f", "echo 2 >d/g");
    succeed(&rebase(&mount, &[]));
    shell(&mount.create("other"), "echo 3 >third");
    mount.commit("other");
    refusal(&mount.run(&["commit", "late"], &[]));
    succeed(&rebase(&mount, &[]));
    shell(&mount.branch("late"), "test \"$(cat f d/g third)\" = $'1\\n2\\n3'; echo 4 >f");
    mount.commit("late");
    shell(&mount.base(), "test \"$(cat f d/g third)\" = $'4\\n2\\n3'");
}

#[test]
fn what_a_branch_got_by_a_rebase_is_no_conflict_of_the_next_one() {
    let mount = stale("echo 1 >f", "echo 2 >d/g");
    succeed(&rebase(&mount, &[]));
    shell(&mount.branch("late"), "echo 2 >>f");
    shell(&mount.create("winner"), "echo 3 >third");
    mount.commit("winner");
    succeed(&rebase(&mount, &[]));
    mount.commit("late");
    shell(&mount.base(), "test \"$(cat f d/g third)\" = $'1\n2\n2\n3'");
}

#[test]
fn a_rebased_branch_survives_a_killed_daemon_and_freezes_main() {
    let mount = stale("echo 1 >f", "echo 2 >d/g; echo 2 >second");
    succeed(&rebase(&mount, &[]));
    let before = snapshot(&mount.branch("late"));
    let frozen = fs::write(mount.mountpoint().join("f"), "").unwrap_err();
    assert_eq!(frozen.raw_os_error(), Some(libc::EROFS));
    mount.kill();
    mount.mount();
    assert_same(&snapshot(&mount.branch("late")), &before, "after a kill");
    mount.commit("late");
    fs::write(mount.mountpoint().join("f"), "free").unwrap();
    shell(&mount.base(), "test \"$(cat f d/g second)\" = $'free2\\n2'");
}

#[test]
fn a_commit_that_was_undone_is_in_no_branchs_way() {
    let mount = stale("echo 1 >f; rm -r gone", "echo 2 >f; echo 2 >gone/below/file");
    succeed(&mount.run(&["undo"], &[]));
    succeed(&mount.run(&["commit", "--rebase", "late"], &[]));
    shell(&mount.base(), "test \"$(cat f gone/below/file)\" = $'2\\n2'");
}

#[test]
fn an_undo_conflicts_with_a_branch_that_changed_the_same_paths() {
    let works = ["echo 2 >f", "chmod 600 f", "mv f d/f", "rm f", "echo 2 >n/first"];
    for work in works {
        let mount = Mount::over(fill);
        shell(&mount.create("first"), "echo 1 >f; mkdir -p n; echo 1 >n/first");
        mount.commit("first");
        let late = mount.create("late");
        shell(&late, work);
        shell(&mount.create("beside"), "echo 2 >d/g");
        succeed(&mount.run(&["undo", "--force"], &[]));
        let paths: &[&str] = if work.contains("n/") { &["n", "n/first"] } else { &["f"] };
        let said = refusal(&rebase(&mount, &[]));
        assert!(said.lines().any(|line| paths.contains(&line.trim())), "{work}: {said}");
        succeed(&rebase(&mount, &["--force"]));
        succeed(&mount.run(&["rebase", "beside"], &[]));
        shell(&mount.branch("beside"), "test \"$(cat f d/g)\" = $'old\n2'; test ! -e n");
        mount.commit("beside");
        shell(&mount.base(), "test \"$(cat f d/g)\" = $'old\n2'; test ! -e n");
    }
}

#[test]
fn conflicts_are_found_after_the_history_has_dropped_the_commit() {
    let mount = Mount::with(&["--history", "1"], fill);
    shell(&mount.create("late"), "echo 2 >f; echo 2 >>d/g; chmod 600 d/h");
    shell(&mount.create("first"), "echo 1 >f; chmod 640 d/g");
    mount.commit("first");
    for round in 0..2 {
        shell(&mount.create("filler"), &format!("echo {round} >filler"));
        mount.commit("filler");
    }
    let said = refusal(&rebase(&mount, &[]));
    for path in ["f", "d/g"] {
        assert!(said.lines().any(|line| line.trim() == path), "{path}: {said}");
    }
    assert!(!said.lines().any(|line| line.trim() == "d/h"), "{said}");
}

#[test]
fn a_live_branch_is_rebased_onto_what_others_changed_in_the_base() {
    let mount = Mount::over(fill);
    shell(&mount.create("late"), "echo 2 >>f; echo 2 >second");
    common::wait_for_the_clock(&mount.base());
    shell(&mount.base(), "echo edited >f");
    refusal(&mount.run(&["commit", "late"], &[]));
    let said = refusal(&rebase(&mount, &[]));
    assert!(said.lines().any(|line| line.trim() == "f"), "{said}");
    shell(&mount.branch("late"), "test \"$(cat f)\" = $'old\\n2'; echo goes on >third");
    succeed(&rebase(&mount, &["--force"]));
    mount.commit("late");
    shell(&mount.base(), "test \"$(cat f second third)\" = $'old\\n2\\n2\\ngoes on'");
}

/// With the overlay driver the branch has no content of its own for such a file.
#[test]
fn a_file_of_which_only_attributes_or_the_name_changed_keeps_its_content_when_others_take_it_away()
{
    let winners = ["rm f", "mv f e", "echo 1 >f", "rm f; mkdir f"];
    let works = [("chmod 600 f", "f"), ("mv f moved/f", "moved/f"), ("mv f g; chmod 600 g", "g")];
    for (winner, (work, path)) in
        winners.iter().flat_map(|winner| works.iter().map(move |work| (winner, *work)))
    {
        let when = format!("{winner} | {work}");
        let mount = Mount::over(fill);
        shell(&mount.create("late"), work);
        shell(&mount.create("winner"), winner);
        mount.commit("winner");
        let said = refusal(&rebase(&mount, &[]));
        assert!(said.lines().any(|line| line.trim() == "f"), "{when}: {said}");
        succeed(&rebase(&mount, &["--force"]));
        let file = mount.branch("late").join(path);
        assert_eq!(fs::read_to_string(file).unwrap(), "old\n", "{when}");
        mount.commit("late");
        assert_eq!(fs::read_to_string(mount.base().join(path)).unwrap(), "old\n", "{when}");
    }
}

/// With the overlay driver the branch has no content of its own for such a file.
#[test]
fn a_stale_branch_keeps_content_that_it_did_not_change_when_the_history_drops_it() {
    for is_remounted in [false, true] {
        let mount = stale("rm f", "chmod 600 f; mv d/g moved/g");
        if is_remounted {
            mount.unmount();
            mount.mount();
        }
        succeed(&mount.run(&["prune", "--keep", "0"], &[]));
        succeed(&rebase(&mount, &["--force"]));
        let content = |path: &str| fs::read_to_string(mount.branch("late").join(path)).unwrap();
        assert_eq!((content("f").as_str(), content("moved/g").as_str()), ("old\n", "old\n"));
        mount.commit("late");
        shell(&mount.base(), "test \"$(cat f moved/g)\" = $'old\nold'; test ! -e d/g");
        mount.unmount();
        mount.assert_clean_store("after the commit");
    }
}

/// A reader keeps the directory known to the kernel, and so to the daemon. The hard link has a name that the branch never
/// looked up, for which the whole tree is listed.
#[test]
fn a_branch_is_rebased_though_others_removed_a_directory_in_which_it_made_a_file() {
    let mount = Mount::over(fill);
    let late = mount.create("late");
    shell(&late, "echo 2 >>d/twin; echo 2 >replaced/new");
    let _reader = File::open(late.join("replaced/old")).unwrap();
    for (name, work) in [("first", "echo 1 >f"), ("second", "rm -r replaced")] {
        shell(&mount.create(name), work);
        mount.commit(name);
    }
    let said = refusal(&rebase(&mount, &[]));
    assert!(said.lines().any(|line| line.trim() == "replaced"), "{said}");
    succeed(&rebase(&mount, &["--force"]));
    mount.commit("late");
    shell(
        &mount.base(),
        "test \"$(cat d/h replaced/new)\" = $'old\\n2\\n2'; test ! -e replaced/old",
    );
}

#[test]
fn a_nested_branch_is_rebased_onto_its_parent() {
    let mount = Mount::over(fill);
    mount.create("outer");
    shell(
        &mount.create_below("outer", "late"),
        "echo 2 >d/g; chmod 711 moved; echo 2 >moved/other",
    );
    shell(&mount.create_below("outer", "winner"), "echo 1 >f; chmod 700 d; echo 1 >d/first");
    mount.commit("winner");
    refusal(&mount.run(&["commit", "late"], &[]));
    succeed(&rebase(&mount, &[]));
    shell(
        &mount.branch("late"),
        "test \"$(cat f d/g d/first)\" = $'1\\n2\\n1'; test \"$(stat -c %a d)\" = 700",
    );
    let frozen = fs::write(mount.branch("outer").join("f"), "").unwrap_err();
    assert_eq!(frozen.raw_os_error(), Some(libc::EROFS));
    mount.commit("late");
    shell(&mount.create_below("outer", "late"), "echo 2 >f");
    shell(&mount.create_below("outer", "winner"), "echo 1 >f");
    mount.commit("winner");
    let said = refusal(&rebase(&mount, &[]));
    assert!(said.lines().any(|line| line.trim() == "f"), "{said}");
    succeed(&mount.run(&["commit", "--rebase", "--force", "late"], &[]));
    mount.commit("outer");
    shell(
        &mount.base(),
        "test \"$(cat f d/g d/first moved/other)\" = $'2\\n2\\n1\\n2'; test \"$(stat -c %a d moved)\" = $'700\\n711'",
    );
}

#[test]
fn a_branch_of_a_stale_parent_and_one_with_live_children_are_not_rebased() {
    let mount = stale("echo 1 >f", "echo 2 >d/g");
    mount.create("outer");
    mount.create_below("outer", "inner");
    let said = refusal(&mount.run(&["rebase", "outer"], &[]));
    assert!(said.contains("live children"), "{said}");
    shell(&mount.create("winner"), "echo 3 >f");
    mount.commit("winner");
    let said = refusal(&mount.run(&["rebase", "inner"], &[]));
    assert!(said.contains("branch outer is stale"), "{said}");
    refusal(&mount.run(&["rebase", "main"], &[]));
}

/// It is forked again, so nothing may write in its parent from then on.
#[test]
fn a_rebase_waits_for_a_file_of_the_parent_that_is_being_closed() {
    let mount = Mount::over(fill);
    let outer = mount.create("outer");
    shell(&mount.create_below("outer", "late"), "echo 2 >d/g");
    shell(&mount.create_below("outer", "winner"), "echo 1 >d/h");
    mount.commit("winner");
    let file = File::options().read(true).write(true).open(outer.join("f")).unwrap();
    let mapping = Mapping::new(&file, 3, Sharing::Writable);
    mapping.write(0, b"new").unwrap();
    drop(file);
    thread::scope(|scope| {
        let rebasing = scope.spawn(|| rebase(&mount, &[]));
        let change = || fs::set_permissions(&outer, Permissions::from_mode(0o755));
        let is_frozen = || change().is_err_and(|error| error.raw_os_error() == Some(libc::EROFS));
        common::wait_until("the parent is frozen", || is_frozen() || rebasing.is_finished());
        drop(mapping);
        succeed(&rebasing.join().unwrap());
    });
    shell(&mount.branch("late"), "test \"$(cat f d/g d/h)\" = $'new\n2\n1'");
}
