//! The overlay driver: the tests of the other files with this driver, and tests of its own.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(clippy::duplicate_mod, reason = "each module of the suite brings its own `common`")]

// The conformance suite: these modules find out by their path that they are here, see `common::driver`.
#[path = "branches.rs"]
mod branches;
#[path = "deep_trees.rs"]
mod deep_trees;
#[path = "descriptors.rs"]
mod descriptors;
#[path = "fail_stop.rs"]
mod fail_stop;
#[path = "faults.rs"]
mod faults;
#[path = "fsx.rs"]
mod fsx;
#[path = "history.rs"]
mod history;
#[path = "killed_daemon.rs"]
mod killed_daemon;
#[path = "mappings.rs"]
mod mappings;
#[path = "model.rs"]
mod model;
#[path = "partial_commit.rs"]
mod partial_commit;
#[path = "partial_commit_model.rs"]
mod partial_commit_model;
#[path = "posix.rs"]
mod posix;
#[path = "power_cuts.rs"]
mod power_cuts;
#[path = "programs.rs"]
mod programs;
#[path = "rebase.rs"]
mod rebase;

mod common {
    pub(crate) use super::branches::common::*;
}

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::disk::Disk;
use common::hold::Hold;
use common::{Mount, assert_same, refusal, shell, snapshot, snapshot_by_names, succeed};

/// The file systems mounted below a mount: mountpoint and options.
fn covers(mount: &Mount) -> Vec<(String, String)> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let inside = mount.mountpoint().join("@");
    let found = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        words[4].starts_with(inside.to_str().unwrap()).then(|| {
            let name = words[4].rsplit('@').next().unwrap();
            (name.to_owned(), words.last().unwrap().to_string())
        })
    });
    found.collect()
}

fn is_covered(mount: &Mount, name: &str) -> bool {
    covers(mount).iter().any(|(covered, _)| covered == name)
}

/// A process whose working directory is `directory`; it ends when this is dropped.
struct Inside(std::process::Child);

impl Inside {
    fn new(directory: &Path) -> Self {
        let mut command = Command::new("cat");
        command.current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn branches_of_main_are_kernel_mounts_with_full_semantics() {
    let mount = Mount::new();
    mount.create("one");
    mount.create_below("one", "inner");
    succeed(&mount.run(&["create", "--disk-limit", "1000000", "limited"], &[]));
    let found = covers(&mount);
    assert_eq!(found.len(), 1, "the nested and the limited branch are the FUSE view's: {found:?}");
    for option in ["index=on", "redirect_dir=on", "metacopy=on"] {
        assert!(found[0].1.split(',').any(|given| given == option), "{option}: {found:?}");
    }
}

#[test]
fn branches_on_a_copy_of_a_btrfs_are_mounted_beside_the_original() {
    let original = Disk::image("256M", "mkfs.btrfs -q");
    shell(&original.base(), "mkdir d; echo old > d/file; echo old > other");
    original.mount();
    // The first file is there with attributes alone, which no other driver can read.
    shell(&original.create("work"), "chmod 600 d/file; mv d e; echo new > other");
    original.unmount();
    let image = original.directory.path().join("image");
    let copy = format!(
        "sync -f '{}'; cp '{}' image; mount -o loop image base",
        original.base().display(),
        image.display()
    );
    let copy = Disk::mounted(&copy);
    assert!(original.has_own_uuid() && !copy.has_own_uuid());
    copy.mount();
    assert!(is_covered(&copy, "work"));
    shell(&copy.branch("work"), "grep -qx old e/file; grep -qx new other");
    copy.commit("work");
    shell(&copy.base(), "grep -qx old e/file; grep -qx new other; test $(stat -c %a e/file) = 600");
}

/// The mark by which the kernel knows the lower directory of a layer.
fn origin_of_layer(mount: &Mount, name: &str) -> (PathBuf, Vec<u8>) {
    let list = mount.ask("list")["branches"].clone();
    let branch = list.as_array().unwrap().iter().find(|branch| branch["name"] == name).unwrap();
    let upper = mount.store().join("layers").join(branch["id"].to_string()).join("upper");
    let mut value = [0; 256];
    let length = rustix::fs::getxattr(&upper, "trusted.overlay.origin", &mut value[..]).unwrap();
    (upper, value[..length].to_vec())
}

#[test]
fn a_branch_that_the_kernel_refuses_to_mount_keeps_no_other_branch_from_being_mounted() {
    let mount = Mount::over(|base| shell(base, "mkdir d; echo old > d/file; echo old > other"));
    shell(&mount.create("healthy"), "echo healthy > new");
    shell(&mount.create("readable"), "echo readable > other");
    shell(&mount.create("unreadable"), "chmod 600 d/file; mv d e");
    let origins = ["readable", "unreadable"].map(|name| origin_of_layer(&mount, name));
    mount.unmount();
    let set = |path: &Path, value: &[u8]| {
        let flags = rustix::fs::XattrFlags::REPLACE;
        rustix::fs::setxattr(path, "trusted.overlay.origin", value, flags).unwrap();
    };
    for (upper, origin) in &origins {
        let mut other = origin.clone();
        *other.last_mut().unwrap() ^= 1;
        set(upper, &other);
    }
    let words = mount.mount_words(&[]);
    let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
    let done = mount.run(&words, &[]);
    succeed(&done);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains("branch readable is presented by fuse"), "{said}");
    assert!(said.contains("branch unreadable cannot be used in this mount"), "{said}");
    assert!(is_covered(&mount, "healthy") && !is_covered(&mount, "readable"));
    shell(&mount.branch("healthy"), "grep -qx healthy new");
    shell(&mount.branch("readable"), "grep -qx readable other");
    let stale =
        fs::read_dir(mount.branch("unreadable")).and_then(|mut names| names.next().unwrap());
    assert_eq!(stale.unwrap_err().raw_os_error(), Some(libc::ESTALE));
    for verb in ["commit", "rebase", "diff"] {
        let said = refusal(&mount.run(&[verb, "unreadable"], &[]));
        assert!(said.contains("the branch is kept"), "{verb}: {said}");
    }
    mount.unmount();
    set(&origins[1].0, &origins[1].1);
    mount.mount();
    shell(&mount.branch("unreadable"), "grep -qx old e/file; test $(stat -c %a e/file) = 600");
    mount.commit("readable");
    succeed(&mount.run(&["commit", "--rebase", "unreadable"], &[]));
    shell(&mount.base(), "grep -qx old e/file; grep -qx readable other");
}

#[test]
fn attributes_alone_are_committed_without_a_copy() {
    let mount = Mount::over(|base| shell(base, "truncate -s 64G huge; echo small > small"));
    let ino = fs::metadata(mount.base().join("huge")).unwrap().ino();
    let branch = mount.create("branch");
    shell(&branch, "chmod 600 huge; touch -c -d '2001-02-03 04:05:06.789' huge; chown 7:8 small");
    let wanted = (snapshot(&branch.join("small")), fs::metadata(branch.join("huge")).unwrap());
    mount.commit("branch");
    let huge = fs::metadata(mount.base().join("huge")).unwrap();
    assert_eq!(huge.ino(), ino, "the file itself is still there");
    assert_eq!((huge.mode(), huge.len()), (0o100600, 64 << 30));
    assert_eq!((huge.mtime(), huge.mtime_nsec()), (wanted.1.mtime(), wanted.1.mtime_nsec()));
    assert_same(&snapshot(&mount.base().join("small")), &wanted.0, "after the commit");
    succeed(&mount.run(&["undo"], &[]));
    assert_eq!(fs::metadata(mount.base().join("huge")).unwrap().mode(), 0o100644);
}

#[test]
fn changes_by_others_in_the_base_since_the_fork_are_drift() {
    let fill = |base: &Path| {
        shell(
            base,
            "for f in edited replaced deleted touched renamed mine; do echo 1 > $f; done; mkdir -p d/e gone moved; echo 1 > d/e/x; echo 1 > gone/x; echo 1 > moved/x",
        );
    };
    let mount = Mount::over(fill);
    let branch = mount.create("branch");
    std::thread::sleep(std::time::Duration::from_millis(20)); // a tick of the file system's clock
    shell(
        &mount.base(),
        "echo 2 >> edited; echo 2 > new; mv new replaced; echo 2 > d/e/x; chmod 600 touched; echo 2 > renamed; echo 2 > mine",
    );
    shell(
        &branch,
        "echo b >> edited; echo b >> replaced; echo b >> deleted; chmod 640 touched; mv renamed elsewhere; mv d D; echo b > D/e/x; rm gone/x; echo b > moved/y",
    );
    shell(&mount.base(), "rm deleted; mv moved moved-away; echo theirs > gone/y");
    let refused = refusal(&mount.run(&["commit", "branch"], &[]));
    for path in ["edited", "replaced", "deleted", "touched", "renamed", "d/e/x", "moved"] {
        assert!(refused.contains(&format!("\n  {path}\n")), "{path} is named in: {refused}");
    }
    assert!(!refused.contains("mine"), "the branch never touched it: {refused}");
    // The branch goes on, and what it did may be forced.
    shell(&branch, "rm touched elsewhere; echo more > more");
    succeed(&mount.run(&["commit", "--force", "branch"], &[]));
    assert_eq!(fs::read_to_string(mount.base().join("edited")).unwrap(), "1\n2\nb\n");
    assert_eq!(fs::read_to_string(mount.base().join("D/e/x")).unwrap(), "b\n");
    assert_eq!(fs::read_to_string(mount.base().join("more")).unwrap(), "more\n");
    assert_eq!(fs::read_to_string(mount.base().join("gone/y")).unwrap(), "theirs\n");
}

#[test]
fn a_commit_of_what_others_left_alone_is_no_conflict() {
    let mount = Mount::over(|base| {
        shell(base, "echo 1 > a; echo 1 > b; mkdir -p d/e; echo 1 > d/e/f; ln a c")
    });
    let branch = mount.create("branch");
    shell(
        &branch,
        "mv a A; echo 2 >> b; mv d/e d/E; mv d D; echo 2 >> D/E/f; mv D/E/f D/E/g; chmod 600 c",
    );
    let wanted = snapshot_by_names(&branch);
    mount.commit("branch");
    assert_same(&snapshot_by_names(&mount.base()), &wanted, "after the commit");
}

#[test]
fn a_diff_of_a_branch_that_is_still_written_knows_every_name() {
    let fill = |base: &Path| shell(base, "mkdir -p p/d; seq 9 > p/d/f; echo l > l; ln l m");
    let mount = Mount::over(fill);
    let branch = mount.create("branch");
    shell(&branch, "mv p/d p/e; mv p Q; echo 10 >> Q/e/f; chmod 600 l; echo more >> l");
    let told = mount.run(&["diff", "branch"], &[]);
    succeed(&told);
    let told = String::from_utf8(told.stdout).unwrap();
    let words: Vec<Vec<&str>> =
        told.lines().map(|line| line.split_whitespace().collect()).collect();
    let wanted = [
        &["renamed", "p", "=>", "Q"][..],
        &["renamed", "p/d", "=>", "Q/e"],
        &["modified", "Q/e/f"],
        &["modified", "l"],
        &["modified", "m"],
    ];
    assert_eq!(words, wanted);
    let dry = mount.run(&["commit", "--dry-run", "branch"], &[]);
    succeed(&dry);
    assert!(String::from_utf8(dry.stdout).unwrap().contains("Q/e"));
    fs::write(branch.join("more"), "").unwrap();
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("m")).unwrap(), "l\nmore\n");
}

#[test]
fn a_file_open_for_writing_stands_against_commit_and_fork_and_is_named() {
    let mount = Mount::over(|base| shell(base, "mkdir d; echo 1 > d/f"));
    let branch = mount.create("branch");
    let mut file = fs::OpenOptions::new().append(true).open(branch.join("d/f")).unwrap();
    assert!(refusal(&mount.run(&["commit", "branch"], &[])).contains("\n  d/f\n"));
    assert!(refusal(&mount.run(&["create", "--parent", "branch", "c"], &[])).contains("\n  d/f\n"));
    writeln!(file, "2").unwrap();
    drop(file);
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("d/f")).unwrap(), "1\n2\n");
}

/// A program whose processes open, write and close a file of their own in a branch all the time, each the number of its
/// last write. At the end each leaves that number in a file beside `end`. They are no threads of the tests: a commit traces
/// who writes.
const REWRITE_FILES: &str = r#"
end=$1 place=$2
shift 2
[ "$place" = . ] || cd / # not a program inside
for name; do (
    number=0
    while [ -d "${end%/*}" ] && [ ! -e "$end" ]; do
        # Fails while the branch is frozen, and after its commit.
        { printf %s "$((number + 1))" > "$place/$name"; } 2> /dev/null && number=$((number + 1))
    done
    echo "$number" > "$end-$name"
) & done
wait
"#;

/// Runs [`REWRITE_FILES`]. They end with the directory of the mount, too, if a test fails.
struct Writers {
    end: PathBuf,
    names: Vec<String>,
    program: Child,
}

impl Writers {
    /// `place` is the branch as its processes find it: an absolute path, or `.` with the branch as working directory.
    fn new(mount: &Mount, branch: &Path, place: &Path, names: &[String]) -> Self {
        let end = mount.directory.path().join("end");
        let mut program = Command::new("sh");
        program.current_dir(branch).args(["-c", REWRITE_FILES, "sh"]).arg(&end).arg(place);
        Self { end, names: names.to_vec(), program: program.args(names).spawn().unwrap() }
    }

    /// Ends them. Returns the last number that each could write.
    fn finish(mut self) -> Vec<u64> {
        fs::write(&self.end, "").unwrap();
        assert!(self.program.wait().unwrap().success());
        let last =
            |name| fs::read_to_string(self.end.with_file_name(format!("end-{name}"))).unwrap();
        self.names.iter().map(|name| last(name).trim_end().parse().unwrap()).collect()
    }
}

/// Runs a verb beside writers until it succeeds. A refusal comes within a bound and names files that are written.
fn run_beside_writers(mount: &Mount, words: &[&str], names: &[String]) -> bool {
    /// Beside 16 writers whose opens go on, none of hundreds succeeds.
    const ATTEMPTS_MAX: usize = 10;
    /// Far above the second and a half that the verb waits: only a wait without a bound takes as long.
    const BOUND: Duration = Duration::from_secs(60);
    (0..ATTEMPTS_MAX).any(|_| {
        let start = Instant::now();
        let output = mount.run(words, &[]);
        assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
        if !output.status.success() {
            let refused = refusal(&output);
            assert!(refused.contains("files open for writing"), "{refused}");
            let named: Vec<_> =
                refused.lines().filter_map(|line| line.strip_prefix("  ")).collect();
            assert!(!named.is_empty(), "{refused}");
            assert!(named.iter().all(|path| names.iter().any(|name| name == path)), "{refused}");
        }
        output.status.success()
    })
}

/// A branch with `count` files of the base, and writers of them that have all begun. `is_inside`: the branch is their
/// working directory.
fn with_writers(count: usize, is_inside: bool) -> (Mount, Vec<String>, Writers) {
    let names: Vec<String> = (0..count).map(|number| format!("f{number}")).collect();
    let fill =
        |base: &Path| names.iter().for_each(|name| fs::write(base.join(name), "old").unwrap());
    let mount = Mount::over(fill);
    let branch = mount.create("branch");
    let place = if is_inside { Path::new(".") } else { &branch };
    let writers = Writers::new(&mount, &branch, place, &names);
    common::wait_until("all files are written", || {
        names.iter().all(|name| fs::read(branch.join(name)).unwrap() != b"old")
    });
    (mount, names, writers)
}

fn assert_written(directory: &Path, names: &[String], last: &[u64]) {
    for (name, last) in names.iter().zip(last) {
        let found = fs::read_to_string(directory.join(name)).unwrap();
        assert_eq!(found, last.to_string(), "{name}");
    }
}

/// Opens by path fail after a moment, so that the files that are open drain.
#[test]
fn a_commit_beside_writers_succeeds_with_all_that_was_written() {
    for count in [1, 4, 16] {
        for _ in 0..common::rounds(1, 10) {
            let (mount, names, writers) = with_writers(count, false);
            let has_succeeded = run_beside_writers(&mount, &["commit", "branch"], &names);
            let last = writers.finish();
            assert!(has_succeeded, "beside {count} writers");
            assert_written(&mount.base(), &names, &last);
            // Refused if a file has changed since the commit recorded it.
            succeed(&mount.run(&["undo"], &[]));
        }
    }
}

#[test]
fn a_fork_beside_writers_succeeds_with_all_that_was_written() {
    let (mount, names, writers) = with_writers(16, false);
    let words = ["create", "--parent", "branch", "child"];
    assert!(run_beside_writers(&mount, &words, &names));
    assert_written(&mount.branch("child"), &names, &writers.finish());
}

/// What finds the branch through its working directory is stopped file by file.
#[test]
fn a_commit_beside_writers_inside_the_branch_succeeds_with_all_that_was_written() {
    for count in [1, 2, 4, 16] {
        let (mount, names, writers) = with_writers(count, true);
        let has_succeeded = run_beside_writers(&mount, &["commit", "branch"], &names);
        let last = writers.finish();
        assert!(has_succeeded, "beside {count} writers");
        assert_written(&mount.base(), &names, &last);
        succeed(&mount.run(&["undo"], &[]));
    }
}

/// A program that makes one file after the other under new names by paths relative to a directory, in `count` processes,
/// and prints the name of each that it could write and close. It ends when `end` exists, or the directory of that is gone.
const MAKE_NEW_FILES: &str = r#"
for process in $(seq "$3"); do (
    cd "$1" || exit 1
    number=0
    while [ -d "${2%/*}" ] && [ ! -e "$2" ]; do
        number=$((number + 1))
        { echo "$number" > "new-$process-$number"; } 2>> "$2-errors-$process" && echo "new-$process-$number"
    done > "$2-names-$process"
) & done
wait
"#;

/// Runs a verb on a branch beside processes that make new files in it, which no cover of a path or of a file can stop.
/// `words` of a command are put before theirs. Returns the mount and the names that they could write.
fn run_beside_makers(words: &[&str], count: usize, verb: &[&str]) -> (Mount, Vec<String>) {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let end = mount.directory.path().join("end");
    let mut command = words.iter().copied().chain(["sh", "-c", MAKE_NEW_FILES, "sh"]);
    let mut program = Command::new(command.next().unwrap());
    let mut makers =
        program.args(command).arg(&branch).arg(&end).arg(count.to_string()).spawn().unwrap();
    common::wait_until("all make files", || {
        (1..=count).all(|process| branch.join(format!("new-{process}-2")).exists())
    });
    let output = mount.run(verb, &[]);
    fs::write(&end, "").unwrap();
    assert!(makers.wait().unwrap().success());
    succeed(&output);
    let errors = (1..=count).map(|process| end.with_file_name(format!("end-errors-{process}")));
    let errors: String = errors.map(|path| fs::read_to_string(path).unwrap()).collect();
    let is_expected =
        |line: &str| line.contains("Read-only file system") || line.contains("Stale file handle");
    assert!(errors.lines().all(is_expected), "{errors}");
    let names = (1..=count).map(|process| end.with_file_name(format!("end-names-{process}")));
    let names: String = names.map(|path| fs::read_to_string(path).unwrap()).collect();
    (mount, names.lines().map(str::to_owned).collect())
}

/// All that was made is in `directory`, and nothing else that has a name of theirs.
fn assert_made(directory: &Path, names: &[String]) {
    assert!(!names.is_empty());
    for name in names {
        let number = name.rsplit('-').next().unwrap();
        let found = fs::read_to_string(directory.join(name))
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(found, format!("{number}\n"), "{name}");
    }
    assert_eq!(
        fs::read_dir(directory)
            .unwrap()
            .filter(|entry| {
                entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("new-")
            })
            .count(),
        names.len()
    );
}

#[test]
fn a_commit_beside_programs_that_make_new_files_inside_succeeds_with_all_of_them() {
    for count in [1, 4, 16] {
        let (mount, names) = run_beside_makers(&[], count, &["commit", "branch"]);
        assert_made(&mount.base(), &names);
    }
}

#[test]
fn a_commit_beside_programs_in_another_mount_namespace_succeeds_with_all_that_they_made() {
    for count in [1, 16] {
        let words = ["unshare", "--mount", "--propagation", "private"];
        let (mount, names) = run_beside_makers(&words, count, &["commit", "branch"]);
        assert_made(&mount.base(), &names);
    }
}

#[test]
fn a_fork_beside_programs_that_make_new_files_inside_succeeds_with_all_of_them() {
    let verb = ["create", "--parent", "branch", "child"];
    let (mount, names) = run_beside_makers(&[], 16, &verb);
    assert_made(&mount.branch("child"), &names);
}

/// A file that stays open lets the commit wait until it is refused. The daemon is killed while it holds a program that makes
/// new files; another program that was stopped before stays stopped until it is continued.
#[test]
fn programs_that_a_commit_holds_continue_when_the_daemon_is_killed() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let held = fs::File::create(branch.join("held")).unwrap();
    let end = mount.directory.path().join("end");
    let start = |script: &str| {
        let mut command = Command::new("sh");
        command.current_dir(&branch).args(["-c", script, "sh"]).arg(&branch).arg(&end).arg("1");
        command.spawn().unwrap()
    };
    let (mut makers, mut stopped) = (start(MAKE_NEW_FILES), start("kill -STOP $$; exit 7"));
    let process = format!("/proc/{}/status", stopped.id());
    let state = || fs::read_to_string(&process).unwrap();
    let has = |line: &str| state().lines().any(|found| found.starts_with(line));
    common::wait_until("it is stopped", || has("State:\tT"));
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| mount.run(&["commit", "branch"], &[]));
        common::wait_until("it is traced", || {
            assert!(!commit.is_finished(), "the commit has not traced it: {}", state());
            !has("TracerPid:\t0")
        });
        mount.kill_alone();
        assert!(!commit.join().unwrap().status.success());
    });
    assert!(has("TracerPid:\t0"), "{}", state());
    assert!(has("State:\tT"), "{}", state());
    fs::write(&end, "").unwrap();
    assert!(makers.wait().unwrap().success());
    shell(Path::new("/"), &format!("kill -CONT {}", stopped.id()));
    assert_eq!(stopped.wait().unwrap().code(), Some(7));
    drop(held);
    mount.mount();
}

/// How many mounts are over a branch.
fn depth(mount: &Mount, name: &str) -> usize {
    covers(mount).iter().filter(|(covered, _)| covered == name).count()
}

#[test]
fn after_a_refused_commit_files_can_be_opened_for_writing_again() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let held = fs::File::create(branch.join("held")).unwrap();
    let end = Arc::new(AtomicBool::new(false));
    let writer = {
        let (path, end) = (branch.join("other"), Arc::clone(&end));
        std::thread::spawn(move || {
            let mut refused = false;
            while !end.load(Ordering::Relaxed) {
                let error = fs::write(&path, "").err().and_then(|error| error.raw_os_error());
                assert!(matches!(error, None | Some(libc::EROFS)), "{error:?}");
                refused |= error.is_some();
            }
            refused
        })
    };
    let refused = refusal(&mount.run(&["commit", "branch"], &[]));
    end.store(true, Ordering::Relaxed);
    assert!(writer.join().unwrap(), "no file was refused while the commit waited");
    assert!(refused.contains("\n  held\n"), "{refused}");
    assert_eq!(covers(&mount).len(), 1, "{:?}", covers(&mount));
    fs::write(branch.join("other"), "after").unwrap();
    drop(held);
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("other")).unwrap(), "after");
}

#[test]
fn a_daemon_that_is_killed_while_a_commit_waits_leaves_a_usable_branch() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let held = fs::File::create(branch.join("held")).unwrap();
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| mount.run(&["commit", "branch"], &[]));
        common::wait_until("the branch is covered", || {
            assert!(!commit.is_finished(), "the commit has not covered the branch");
            depth(&mount, "branch") == 2
        });
        mount.kill_alone();
        assert!(!commit.join().unwrap().status.success());
    });
    drop(held);
    mount.mount();
    assert_eq!(covers(&mount).len(), 1, "{:?}", covers(&mount));
    fs::write(branch.join("file"), "after").unwrap();
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("file")).unwrap(), "after");
}

/// Any program that is started in a mount namespace of its own has copies of all mounts. The mount waits for it, but not
/// for ever.
#[test]
fn processes_that_have_copies_of_the_mounts_of_a_killed_daemon_are_named() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    fs::write(branch.join("file"), "kept").unwrap();
    let mut words = vec!["-m", "--propagation", "private", "sh", "-c"];
    words.push("echo; read line");
    let mut copies = Command::new("unshare");
    copies.args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut copies = copies.spawn().unwrap();
    copies.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    mount.kill();
    let words = mount.mount_words(&[]);
    let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
    let refused = refusal(&mount.run(&words, &[]));
    assert!(refused.contains("branch branch is still in use"), "{refused}");
    assert!(refused.contains(&format!("{} (sh)", copies.id())), "{refused}");
    drop(copies.stdin.take());
    copies.wait().unwrap();
    mount.mount();
    assert_eq!(fs::read_to_string(branch.join("file")).unwrap(), "kept");
}

/// Only the mapping keeps the file open: no process has a descriptor of it.
#[test]
fn a_file_that_is_only_mapped_for_writing_stands_against_a_commit_and_is_named() {
    const MAP: &str = "import mmap, os, sys
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
os.closerange(3, 100)
print(flush=True)
sys.stdin.read()
os._exit(0)";
    let mount = Mount::over(|base| shell(base, "mkdir d; echo content > d/f"));
    let branch = mount.create("branch");
    let mut command = Command::new("python3");
    command.args(["-c", MAP]).arg(branch.join("d/f"));
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    process.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let find = |path: &str| {
        let refused = refusal(&mount.run(&["commit", "branch"], &[]));
        assert!(refused.contains(path), "{refused}");
    };
    find("\n  d/f\n");
    fs::remove_file(branch.join("d/f")).unwrap();
    find("\n  d/f (deleted)\n");
    find(&format!("end the processes that have them open: {} (python3)", process.id()));
    drop(process.stdin.take());
    process.wait().unwrap();
    mount.commit("branch");
    assert!(!mount.base().join("d/f").exists());
}

#[test]
fn a_deleted_file_that_is_open_for_writing_is_named() {
    let mount = Mount::over(|base| shell(base, "mkdir d"));
    let branch = mount.create("branch");
    for name in ["d/f", "f"] {
        let _file = fs::File::create(branch.join(name)).unwrap();
        fs::remove_file(branch.join(name)).unwrap();
        let refused = refusal(&mount.run(&["commit", "branch"], &[]));
        assert!(refused.contains(&format!("\n  {name} (deleted)\n")), "{refused}");
    }
}

/// The kernel stops no writing while a deleted file is open, for reading too, or a deleted directory is in use.
#[test]
fn a_deleted_file_that_is_still_open_is_named_with_its_process() {
    let mount = Mount::over(|base| shell(base, "mkdir d; echo content > d/f"));
    let branch = mount.create("branch");
    for script in ["exec 3< d/f; rm d/f", "mkdir d/gone; cd d/gone; rmdir $PWD"] {
        let mut command = Command::new("bash");
        command.args(["-euc", &format!("{script}; echo ready; read line")]).current_dir(&branch);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        process.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
        let name = if script.contains("gone") { "gone" } else { "f" };
        for words in [&["commit", "branch"][..], &["create", "--parent", "branch", "child"]] {
            let refused = refusal(&mount.run(words, &[]));
            for part in [
                "has deleted files or directories that are still open",
                &format!("\n  d/{name} (deleted)\n"),
                &format!("end the processes that have them open: {} (bash)", process.id()),
            ] {
                assert!(refused.contains(part), "{refused}");
            }
        }
        drop(process.stdin.take());
        process.wait().unwrap();
    }
    mount.create_below("branch", "child");
    mount.abort("child");
    mount.commit("branch");
    assert_eq!(fs::read_dir(mount.base().join("d")).unwrap().count(), 0);
}

#[test]
fn a_process_inside_blocks_no_verb() {
    let mount = Mount::over(|base| shell(base, "mkdir d; echo 1 > d/f"));
    let (one, two) = (mount.create("one"), mount.create("two"));
    let inside = [Inside::new(&one.join("d")), Inside::new(&two)];
    fs::write(one.join("d/f"), "won").unwrap();
    mount.commit("one");
    assert_eq!(fs::read_to_string(mount.base().join("d/f")).unwrap(), "won");
    assert_eq!(fs::read_dir(&two).unwrap_err().raw_os_error(), Some(libc::ESTALE));
    mount.abort("two");
    assert!(covers(&mount).is_empty());
    let three = mount.create("three");
    let last = Inside::new(&three);
    mount.abort("three");
    assert!(!three.exists());
    drop((inside, last));
}

#[test]
fn an_unmount_is_refused_while_a_branch_is_in_use_and_all_continues() {
    let mount = Mount::new();
    let branches = [mount.create("one"), mount.create("two"), mount.create("three")];
    let inside = Inside::new(&branches[1]);
    assert!(refusal(&mount.run(&["unmount"], &[])).contains("branch two is in use"));
    let outer = Inside::new(&mount.mountpoint());
    drop(inside);
    assert!(refusal(&mount.run(&["unmount"], &[])).contains("the mount is in use"));
    assert_eq!(covers(&mount).len(), 3, "every branch is there again");
    for branch in &branches {
        fs::write(branch.join("file"), "content").unwrap();
    }
    drop(outer);
    mount.unmount();
    mount.mount();
    assert_eq!(fs::read_to_string(branches[2].join("file")).unwrap(), "content");
}

#[test]
fn a_nested_branch_reads_what_the_kernel_wrote() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p d/e; head -c 300000 /dev/urandom > big; echo 1 > d/e/f; echo linked > a; mkdir l; ln a l/b; ln a l/c; echo gone > gone",
        );
    });
    let parent = mount.create("parent");
    shell(
        &parent,
        "chmod 600 big; touch -c -d 2001-02-03 big; mv d/e d/E; mv d D; mv big D/huge; echo more >> a; rm gone; mkdir gone; echo new > gone/new",
    );
    let wanted = snapshot_by_names(&parent);
    let child = mount.create_below("parent", "child");
    assert_same(&snapshot_by_names(&child), &wanted, "in the child");
    let frozen = fs::write(parent.join("late"), "").unwrap_err();
    assert_eq!(frozen.raw_os_error(), Some(libc::EROFS));
    mount.abort("child");
    shell(&parent, "echo thawed > thawed; echo again >> l/b; chmod 640 D/huge");
    let child = mount.create_below("parent", "child");
    shell(&child, "echo child >> a; mv D/E E; chmod 755 D; rm l/c");
    let wanted = snapshot_by_names(&child);
    mount.commit("child");
    assert!(!is_covered(&mount, "parent"), "its layers are two now: the FUSE view's");
    assert_same(&snapshot_by_names(&parent), &wanted, "in the parent");
    mount.unmount();
    mount.mount();
    assert_same(&snapshot_by_names(&parent), &wanted, "after a remount");
    mount.commit("parent");
    assert_same(&snapshot_by_names(&mount.base()), &wanted, "in the base");
}

/// The kernel keeps the layer of a file that is open. A name outside the base would ask for a look at the whole layer.
#[test]
fn a_branch_whose_files_are_open_takes_a_nested_commit_and_keeps_the_rest_of_a_partial_one() {
    let mount = Mount::over(|base| {
        shell(base, "mkdir d; echo 1 > f; echo 2 > g; ln f ../outside; ln g d/g");
    });
    let parent = mount.create("parent");
    shell(&parent, "echo more >> f; echo more >> d/g; echo new > new");
    let mut reader = fs::File::open(parent.join("f")).unwrap();
    let child = mount.create_below("parent", "child");
    shell(&child, "echo child >> f; mv d e");
    let wanted = snapshot_by_names(&child);
    mount.commit("child");
    assert_same(&snapshot_by_names(&parent), &wanted, "in the parent");
    let mut read = String::new();
    reader.read_to_string(&mut read).unwrap();
    assert_eq!(read, "1\nmore\n", "an open file shows the branch before the commit");
    mount.abort("parent");

    let branch = mount.create("branch");
    shell(&branch, "echo more >> f; echo more >> d/g; echo new > new");
    let _reader = fs::File::open(branch.join("f")).unwrap();
    let wanted = snapshot_by_names(&branch);
    succeed(&mount.run(&["commit", "--only", "new", "branch"], &[]));
    assert_same(&snapshot_by_names(&branch), &wanted, "in the branch that keeps the rest");
    mount.commit("branch");
    assert_same(&snapshot_by_names(&mount.base()), &wanted, "in the base");
}

/// A branch `late` that another commit made stale. A file of it has a name outside of the base: to find its names in the
/// branch, the kernel must have the branch mounted.
fn stale_with_a_name_outside() -> Mount {
    let mount = Mount::over(|base| {
        shell(base, "mkdir d; echo 1 > f; echo 2 > g; ln f ../outside; ln g d/g");
    });
    shell(&mount.create("late"), "echo more >> f; echo more >> d/g; echo new > new; mv d e");
    mount
}

fn make_stale(mount: &Mount, work: &str) {
    shell(&mount.create("winner"), work);
    mount.commit("winner");
    assert_eq!(mount.ask("list")["branches"][0]["state"], "stale");
}

#[test]
fn a_stale_branch_whose_files_are_open_is_rebased() {
    let mount = stale_with_a_name_outside();
    let late = mount.branch("late");
    let mut reader = fs::File::open(late.join("f")).unwrap();
    make_stale(&mount, "echo winner > w");
    succeed(&mount.run(&["rebase", "late"], &[]));
    let mut read = String::new();
    reader.read_to_string(&mut read).unwrap();
    assert_eq!(read, "1\nmore\n", "the open file");
    shell(
        &late,
        "test \"$(cat w)\" = winner; test ! -e d; test \"$(cat e/g)\" = \"$(cat g)\"; echo 3 >> f",
    );
    let wanted = snapshot_by_names(&late);
    mount.commit("late");
    assert_same(&snapshot_by_names(&mount.base()), &wanted, "in the base");
    let text = fs::read_to_string(mount.base().join("f")).unwrap();
    assert_eq!(text, "1\nmore\n3\n");
}

#[test]
fn a_refused_rebase_leaves_the_open_files_of_a_stale_branch_as_they_were() {
    let mount = stale_with_a_name_outside();
    let late = mount.branch("late");
    let reader = fs::File::open(late.join("f")).unwrap();
    make_stale(&mount, "echo winner >> f");
    let said = refusal(&mount.run(&["rebase", "late"], &[]));
    assert!(said.contains("its parent has changed at the same paths"), "{said}");
    let opened = format!("/proc/self/fd/{}", reader.as_raw_fd());
    let mut writer = fs::File::options().append(true).open(&opened).unwrap();
    writer.write_all(b"through the open file\n").unwrap();
    let said = refusal(&mount.run(&["rebase", "--force", "late"], &[]));
    assert!(said.contains("open for writing") && said.contains("\n  f"), "{said}");
    writer.write_all(b"and again\n").unwrap();
    drop(writer);
    assert_eq!(mount.ask("list")["branches"][0]["state"], "stale");
    succeed(&mount.run(&["rebase", "--force", "late"], &[]));
    fs::File::options().append(true).open(&opened).unwrap_err();
    let text = "1\nmore\nthrough the open file\nand again\n";
    assert_eq!(fs::read_to_string(late.join("f")).unwrap(), text);
    mount.commit("late");
    assert_eq!(fs::read_to_string(mount.base().join("f")).unwrap(), text);
}

/// The mount that is unmounted does not wait for it.
#[test]
fn a_stale_branch_whose_files_are_open_keeps_no_mount_from_being_unmounted() {
    let mount = stale_with_a_name_outside();
    let reader = fs::File::open(mount.branch("late").join("f")).unwrap();
    make_stale(&mount, "echo winner > w");
    mount.unmount();
    drop(reader);
    mount.mount();
    succeed(&mount.run(&["rebase", "late"], &[]));
    mount.commit("late");
    let text = fs::read_to_string(mount.base().join("e/g")).unwrap();
    assert_eq!(text, "2\nmore\n");
}

#[test]
fn a_branch_that_the_kernel_wrote_continues_under_fuse() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "head -c 300000 /dev/urandom > big; echo linked > a; mkdir l d; ln a l/b; echo 1 > d/f; echo 1 > other",
        );
    });
    let branch = mount.create("branch");
    shell(&branch, "chmod 600 big; echo more >> a; mv d D; echo 2 >> other; rm D/f");
    let wanted = snapshot(&branch);
    let ino = fs::metadata(branch.join("other")).unwrap().ino();
    mount.unmount();
    succeed(&mount.run(&["mount", "--driver", "fuse", "--base"], &[&mount.base()]));
    assert!(covers(&mount).is_empty());
    assert_same(&snapshot(&branch), &wanted, "under fuse");
    assert_eq!(fs::metadata(branch.join("other")).unwrap().ino(), ino, "the number shown stays");
    mount.unmount();
    mount.mount();
    assert!(!is_covered(&mount, "branch"), "what fuse wrote, fuse goes on with");
    assert_same(&snapshot(&branch), &wanted, "under both");
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "in the base");
}

#[test]
fn a_mount_over_a_dead_one_takes_its_place() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "base").unwrap());
    let branch = mount.create("kept");
    fs::write(branch.join("file"), "changed").unwrap();
    mount.kill_alone();
    mount.mount();
    assert_eq!(fs::read_to_string(branch.join("file")).unwrap(), "changed");
    assert_eq!(covers(&mount).len(), 1);
}

#[test]
fn the_end_of_one_branch_leaves_the_others_mounted() {
    let mount = Mount::new();
    let kept = mount.create("kept");
    mount.create_below("kept", "inner");
    assert!(!kept.join("@other").exists());
    mount.abort("inner");
    mount.create("gone");
    mount.abort("gone");
    let parent = mount.create("parent");
    let child = mount.create_below("parent", "child");
    fs::write(child.join("file"), "child").unwrap();
    mount.commit("child");
    assert!(is_covered(&mount, "kept"));
    fs::write(kept.join("file"), "kept").unwrap();
    assert_eq!(fs::read_to_string(parent.join("file")).unwrap(), "child");
}

#[test]
fn the_stores_name_cannot_be_committed() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    assert!(!branch.join(".branching").exists());
    fs::create_dir(branch.join(".branching")).unwrap();
    let refused = refusal(&mount.run(&["commit", "branch"], &[]));
    assert!(refused.contains("a .branching of its own"), "{refused}");
    fs::remove_dir(branch.join(".branching")).unwrap();
    fs::write(branch.join("file"), "").unwrap();
    mount.commit("branch");
    assert!(mount.base().join("file").exists());
    let left = Command::new("find")
        .arg(mount.base())
        .args(["-mindepth", "2", "-name", ".branching", "-print"])
        .output();
    assert!(left.unwrap().stdout.is_empty(), "nothing of that name is left in the history");
    succeed(&mount.run(&["undo"], &[]));
    assert!(!mount.base().join("file").exists());
}

#[test]
fn the_owner_can_remove_a_store_that_was_left() {
    let mount = Mount::unmounted(|base| {
        shell(base, "echo 1 > a; ln a b; mkdir d; echo 1 > d/f; chown -R 12345:12345 .");
    });
    fs::set_permissions(mount.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    mount.mount();
    let branch = mount.create("branch");
    shell(
        &branch,
        "setpriv --reuid 12345 --regid 12345 --clear-groups bash -c 'echo 2 >> b; echo 2 > d/f; rm -r d'",
    );
    mount.unmount();
    let status = Command::new("setpriv")
        .args(["--reuid", "12345", "--regid", "12345", "--clear-groups", "rm", "-rf"])
        .arg(mount.base().join(".branching"))
        .status()
        .unwrap();
    assert!(status.success() && !mount.base().join(".branching").exists());
}

/// Mounts without the capability that the kernel's index takes.
fn mount_without_index(mount: &Mount, driver: &str) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-dac_read_search", "--inh-caps", "-dac_read_search"]);
    command.args([common::PROGRAM, "mount", "--driver", driver, "--base"]);
    command.arg(mount.base()).arg(mount.mountpoint()).output().unwrap()
}

#[test]
fn auto_is_overlay_where_it_has_its_full_semantics() {
    let chosen = |options: &[&str]| {
        let mount = Mount::unmounted(|_| ());
        let words = [&["mount", "--driver", "auto"], options, &["--base"]].concat();
        succeed(&mount.run(&words, &[&mount.base()]));
        let info = mount.ask("info");
        (info["driver"].clone(), info["why_not"].as_str().unwrap().to_owned())
    };
    assert_eq!(chosen(&[]), ("overlay".into(), "overlay has its full semantics here".to_owned()));
    let (driver, why_not) = chosen(&["--policy", "snapshot"]);
    assert_eq!(driver, "fuse");
    assert!(why_not.contains("first-winner"), "{why_not}");
    let (driver, why_not) = chosen(&["--control-files"]);
    assert_eq!(driver, "fuse");
    assert!(why_not.contains("control files"), "{why_not}");
}

#[test]
fn auto_is_fuse_where_the_index_cannot_be_had_and_says_why() {
    let mount = Mount::unmounted(|_| ());
    succeed(&mount_without_index(&mount, "auto"));
    let info = mount.ask("info");
    assert_eq!(info["driver"], "fuse");
    assert!(info["why_not"].as_str().unwrap().contains("DAC_READ_SEARCH"), "{info}");
}

#[test]
fn a_missing_index_feature_is_reported_by_the_driver() {
    let mount = Mount::unmounted(|_| ());
    let refused = refusal(&mount_without_index(&mount, "overlay"));
    assert!(refused.contains("index=on") && refused.contains("DAC_READ_SEARCH"), "{refused}");
    assert!(!mount.base().join(".branching").exists());
}

#[test]
fn other_branches_continue_while_the_writing_in_one_is_stopped_for_a_fork() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "old\n").unwrap());
    shell(&mount.create("outer"), "echo new > file");
    let apart = mount.create("apart");
    mount.create("doomed");
    let id = mount.ask("list")["branches"][0]["id"].to_string();
    let mut hold = Hold::new(&mount, &mount.store().join("layers").join(id).join("upper"));
    let forked = Command::new(common::PROGRAM)
        .args(["create", "--parent", "outer", "inner"])
        .arg(mount.mountpoint())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    hold.hear("held");
    let run = |words: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["60", common::PROGRAM]).args(words).arg(mount.mountpoint());
        succeed(&command.stdin(Stdio::null()).output().unwrap());
    };
    run(&["create", "late"]);
    run(&["diff", "apart"]);
    run(&["abort", "doomed"]);
    shell(&apart, "echo mine > mine");
    hold.release();
    succeed(&forked.wait_with_output().unwrap());
    assert_eq!(fs::read_to_string(mount.branch("inner").join("file")).unwrap(), "new\n");
    let refused = fs::write(mount.branch("outer").join("file"), "").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS), "it has a child");
}

#[test]
fn a_branch_shows_the_attributes_that_the_base_has_at_the_fork() {
    let flags = rustix::fs::XattrFlags::empty();
    let mount = Mount::over(|base| {
        rustix::fs::setxattr(base, "user.early", b"x", flags).unwrap();
        fs::write(base.join("old"), "").unwrap();
    });
    let base = mount.base();
    shell(&base, "chmod 711 .; chown 1:2 .; echo x > new; rm old");
    rustix::fs::setxattr(&base, "user.late", b"y", flags).unwrap();
    rustix::fs::removexattr(&base, "user.early").unwrap();
    let branch = mount.create("branch");
    assert_same(&snapshot(&branch), &snapshot(&base), "the branch");
    // The kernel checks permissions by the attributes that the branch shows.
    shell(&branch, "! setpriv --reuid=9 --regid=9 --clear-groups ls . 2>/dev/null");
    mount.commit("branch");
}

/// S6 and S8.
#[test]
fn siblings_live_on_when_a_commit_asks_for_the_policy_snapshot() {
    let mount = Mount::over(|base| {
        shell(base, "mkdir d; echo old >f; echo old >d/g; echo old >d/h; echo old >m; ln f link")
    });
    let (one, two, three) = (mount.create("one"), mount.create("two"), mount.create("three"));
    for name in ["one", "two", "three"] {
        assert!(is_covered(&mount, name));
    }
    shell(&two, "echo two >d/h; chmod 600 m; mv f moved; mkdir new2; echo two >new2/two");
    shell(&three, "echo three >d/g; chmod 640 m");
    shell(&one, "echo one >d/g; mkdir new; echo one >new/one");
    let commit = |name: &str| mount.run(&["commit", "--policy", "snapshot", name], &[]);
    succeed(&commit("one"));
    shell(&two, "test \"$(cat d/h moved)\" = $'two\\nold'; echo more >>d/h");
    succeed(&commit("two"));
    for round in ["mounted", "mounted again"] {
        let said = refusal(&commit("three"));
        for path in ["d/g", "m"] {
            assert!(said.lines().any(|line| line.trim() == path), "{round}, {path}: {said}");
        }
        assert_eq!(fs::read_to_string(three.join("d/g")).unwrap(), "three\n", "{round}");
        mount.unmount();
        mount.mount();
    }
    assert_eq!(fs::read_to_string(three.join("f")).unwrap(), "old\n", "its snapshot");
    succeed(&mount.run(&["commit", "--policy", "snapshot", "--skip", "--drop-rest", "three"], &[]));
    shell(
        &mount.base(),
        "test \"$(cat d/g d/h moved new/one new2/two)\" = $'one\\ntwo\\nmore\\nold\\none\\ntwo'
         test ! -e f; test \"$(stat -c %a m)\" = 600",
    );
    for _ in 0..2 {
        succeed(&mount.run(&["undo"], &[]));
    }
    shell(&mount.base(), "test \"$(cat f d/g d/h m)\" = $'old\\nold\\nold\\nold'; test ! -e new");
}

#[test]
fn a_commit_cannot_ask_for_the_policy_serializable() {
    let mount = Mount::new();
    fs::write(mount.create("one").join("f"), "").unwrap();
    let said = refusal(&mount.run(&["commit", "--policy", "serializable", "one"], &[]));
    assert!(said.contains("does not record what a branch reads"), "{said}");
    mount.commit("one");
}

#[test]
fn a_kept_branch_in_a_copy_of_the_base_is_presented_by_fuse() {
    let mount = Mount::over(|base| fs::write(base.join("file"), "base").unwrap());
    fs::write(mount.create("kept").join("file"), "branch").unwrap();
    mount.unmount();
    let copy = Mount::unmounted(|base| {
        succeed(&Command::new("cp").arg("-aT").arg(mount.base()).arg(base).output().unwrap());
    });
    let words = copy.mount_words(&[]);
    let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
    let done = copy.run(&words, &[]);
    succeed(&done);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(said.contains("branch kept is presented by fuse"), "{said}");
    assert!(!is_covered(&copy, "kept"));
    assert_eq!(fs::read_to_string(copy.branch("kept").join("file")).unwrap(), "branch");
    fs::write(copy.create("new").join("other"), "new").unwrap();
    assert!(is_covered(&copy, "new"));
}
