//! Each system call of each verb fails once, in a daemon that serves a real mount: afterwards the base and every branch
//! are old or new, as the answer says, and never between; no later commit is changed, and the store is clean.
//!
//! A run without a fault is traced first, which gives the calls of the verb: the name of a call, and how often one thread
//! makes it. In each further run one of them fails (`strace --inject`): the call of that number in each thread, of all
//! threads of the daemon. An ordinary run takes an evenly spread sample, always the same one; `BRANCHFS_SOAK` takes every
//! call, with one error number and then with each other one that the engine tells from it, or as many as it can in
//! `BRANCHFS_SOAK_SECONDS` for each verb, after the `BRANCHFS_SOAK_SKIP` first ones. A failure prints the value of `BRANCHFS_FAULT` with which the test repeats that one run.
//!
//! The sweep in `src/workspace/fault_tests.rs` is faster and counts the calls of all threads together, but has no
//! mount: the overlay driver, the kernel's overlayfs, and the daemon's other threads have part only here.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Mount, Object, assert_same, snapshot_by_names, succeed};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags};
use rustix::process::{PidfdFlags, Signal};

const ERRORS: [&str; 4] = ["EIO", "ENOSPC", "EPERM", "EDQUOT"];

/// Faults after which something was wrong once: every run tries these too.
const FOUND: [(Verb, &str, usize, &str); 15] = [
    // A mark that could not be read was taken for none.
    (Verb::Commit, "lgetxattr", 1, "EPERM"),
    (Verb::Commit, "lgetxattr", 14, "EDQUOT"),
    (Verb::Commit, "openat2", 2, "ENOSPC"),
    // The branch kept a time of its root that the driver had changed.
    (Verb::NestedCommit, "utimensat", 1, "ENOSPC"),
    // The branch was rebased, and the answer said that it was not.
    (Verb::Rebase, "dup", 7, "EPERM"),
    (Verb::Rebase, "dup", 8, "EDQUOT"),
    // A layer of the kernel's was taken for one of the daemon's own.
    (Verb::Commit, "statx", 25, "ENOSPC"),
    // It recovered nothing, or not in the store that the base names.
    (Verb::Recover, "readlink", 6, "ENOSPC"),
    (Verb::Recover, "statx", 1, "EIO"),
    // A mount stayed over the branch.
    (Verb::NestedCommit, "umount2", 1, "EDQUOT"),
    // The layer was half converted, and the kernel refused it at the next mount, which failed.
    (Verb::PartialCommit, "statx", 153, "EDQUOT"),
    (Verb::PartialCommit, "lgetxattr", 219, "EDQUOT"),
    (Verb::PartialCommit, "getdents64", 122, "EIO"),
    // The fault hit the test's own query for the pid of the daemon.
    (Verb::Undo, "statx", 1, "EIO"),
    (Verb::Abort, "statx", 1, "EIO"),
];

/// Calls that are not made to fail: they reach no file system, or an error would be one of strace's (a `close` that is
/// not made leaks the descriptor).
const OTHER_CALLS: &str = "
    accept4 arch_prctl bind brk clock_nanosleep clone clone3 close close_range connect dup2 dup3
    epoll_wait execve exit exit_group fcntl futex getegid geteuid getgid getpid getrandom getrlimit
    getsockopt gettid getuid kill listen madvise membarrier mmap mprotect mremap munmap nanosleep
    pidfd_open pipe2 poll ppoll prctl prlimit64 recvfrom recvmsg restart_syscall rseq rt_sigaction
    rt_sigprocmask rt_sigreturn sched_getaffinity sched_setattr sched_setscheduler sched_yield sendmsg
    sendto set_robust_list set_tid_address setpriority setsid setsockopt shutdown sigaltstack socket
    socketpair sysinfo tgkill umask uname vfork wait4 waitid
";

/// Calls with which the daemon also serves requests and peers. Only those on files fail.
const TRANSFERS: [&str; 6] = ["read", "write", "readv", "writev", "pread64", "pwrite64"];

/// Threads of the daemon, other than those that serve the kernel's requests, that do not end by themselves.
const LASTING: [&str; 2] = ["control", "background"];

/// What runs with the fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verb {
    Commit,
    PartialCommit,
    NestedCommit,
    Undo,
    Redo,
    Rebase,
    Create,
    Abort,
    Import,
    Prune,
    /// The mount after a kill in the middle of a commit.
    Mount,
    /// `branchfs recover` after such a kill.
    Recover,
}

/// One call of a verb that fails.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Call {
    name: String,
    /// Which one of this name in a thread, from 1.
    number: usize,
}

/// A traced daemon, as long as this lives.
struct Trace {
    strace: Child,
    log: PathBuf,
    /// Kept open: strace would die of a message that it cannot write.
    _errors: Option<BufReader<ChildStderr>>,
}

impl Trace {
    /// Attaches to the daemon of a mount, whose pid is `daemon`.
    fn attach(mount: &Mount, daemon: i32, rules: &[String]) -> Self {
        let (mut strace, log) = Self::command(mount, rules);
        let of_transfers = |rule: &String| rule.strip_prefix("-etrace=").is_some_and(is_transfer);
        let mut attached = 1;
        if rules.iter().any(of_transfers) {
            // Threads that serve requests would end with an error of the kernel's device.
            let mut threads = threads_of(daemon);
            threads.retain(|thread| LASTING.contains(&name_of(daemon, *thread).trim()));
            attached = threads.len();
            strace.args(threads.iter().flat_map(|thread| ["-p".to_owned(), thread.to_string()]));
        } else {
            strace.arg("-f").arg("-p").arg(daemon.to_string());
        }
        let mut child = strace.spawn().unwrap();
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        for _ in 0..attached {
            let mut line = String::new();
            errors.read_line(&mut line).unwrap();
            let has_ended = line.contains("No such process"); // the thread of a connection
            assert!(line.contains("attached") || has_ended, "{line}");
        }
        Self { strace: child, log, _errors: Some(errors) }
    }

    fn command(mount: &Mount, rules: &[String]) -> (Command, PathBuf) {
        let log = mount.directory.path().join("trace");
        let mut strace = Command::new("strace");
        strace.args(["-y", "-I", "2", "-s", "0", "-o"]).arg(&log).args(rules);
        strace.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        (strace, log)
    }

    /// Detaches. Returns what was traced.
    fn end(self) -> String {
        self.end_with(Signal::INT)
    }

    /// Detaches by a signal, which strace also sends to a program that it has started if it can.
    fn end_with(mut self, signal: Signal) -> String {
        let pid = rustix::process::Pid::from_child(&self.strace);
        let _ = rustix::process::kill_process(pid, signal);
        self.strace.wait().unwrap();
        String::from_utf8_lossy(&fs::read(&self.log).unwrap()).into_owned()
    }

    /// Returns when the daemon has died, which strace does not notice of a process with threads.
    fn wait_for_death(mut self, daemon: &OwnedFd) {
        common::wait_until("the daemon dies", || {
            let mut poll = [PollFd::new(daemon, PollFlags::IN)];
            // Its threads are dead when strace, which was to see each die, is.
            let _ = self.strace.kill();
            rustix::event::poll(&mut poll, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
        });
        self.strace.wait().unwrap();
    }
}

fn fault(call: &Call, error: &str) -> [String; 2] {
    let Call { name, number } = call;
    [format!("-etrace={name}"), format!("-einject={name}:error={error}:when={number}")]
}

fn is_transfer(name: &str) -> bool {
    TRANSFERS.contains(&name)
}

fn threads_of(process: i32) -> BTreeSet<i32> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.map(|task| task.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
}

/// Waits until the threads that go on after an answer have nothing to do, or at most a moment.
fn wait_for_rest(daemon: i32) {
    const LOOKS_MAX: usize = 200;
    const QUIET_LOOKS: usize = 8;
    let is_asleep = |thread: &i32| {
        let stat = fs::read_to_string(format!("/proc/{daemon}/task/{thread}/stat"));
        stat.is_err() || stat.is_ok_and(|stat| stat.contains(") S "))
    };
    let mut quiet = 0;
    for _ in 0..LOOKS_MAX {
        std::thread::sleep(Duration::from_millis(2));
        let tasks = fs::read_dir(format!("/proc/{daemon}/task"));
        let is_quiet = tasks.is_err() || threads_of(daemon).iter().all(is_asleep);
        quiet = if is_quiet { quiet + 1 } else { 0 };
        if quiet == QUIET_LOOKS {
            return;
        }
    }
}

fn name_of(process: i32, thread: i32) -> String {
    fs::read_to_string(format!("/proc/{process}/task/{thread}/comm")).unwrap_or_default()
}

/// The threads that serve the requests of the kernel.
fn servers(daemon: i32) -> BTreeSet<i32> {
    // A thread begins with the name of the process.
    let is_unnamed =
        |thread: &i32| *thread != daemon && name_of(daemon, *thread) == name_of(daemon, daemon);
    common::wait_until("all threads are named", || !threads_of(daemon).iter().any(is_unnamed));
    let mut servers = threads_of(daemon);
    servers.retain(|thread| *thread == daemon || name_of(daemon, *thread).starts_with("request-"));
    servers
}

/// The calls in a trace that can be made to fail. Transfers of the threads `servers` are not among them.
fn calls_of(trace: &str, servers: &BTreeSet<i32>) -> BTreeSet<Call> {
    let mut counts = BTreeMap::<(&str, &str), usize>::new();
    let (mut calls, mut forbidden) = (BTreeSet::new(), BTreeSet::new());
    // The loader's are not the program's.
    let mut is_loaded = !trace.contains("execve(");
    for line in trace.lines() {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let Some((name, arguments)) = rest.trim_start().split_once('(') else { continue };
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            continue; // a signal, an end, the second part of a call
        }
        if is_transfer(name) && servers.iter().any(|server| server.to_string() == thread) {
            continue;
        }
        let count = counts.entry((thread, name)).or_default();
        *count += 1;
        is_loaded |= name == "getrandom" || name == "sigaltstack";
        let call = Call { name: name.to_owned(), number: *count };
        if OTHER_CALLS.split_whitespace().any(|other| other == name) {
            continue;
        }
        if !is_loaded {
            forbidden.insert(call);
        } else if is_transfer(name) {
            let file = arguments.split_once('<').map_or("", |(_, file)| file);
            let is_file = file.starts_with('/') && !file.starts_with("/dev/fuse");
            if is_file {
                calls.insert(call)
            } else {
                forbidden.insert(call)
            };
        } else {
            calls.insert(call);
        }
    }
    calls.difference(&forbidden).cloned().collect()
}

fn fixed(nanoseconds: i64) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 },
        last_modification: Timespec { tv_sec: 1_000_000_000, tv_nsec: nanoseconds },
    }
}

/// Gives all that was changed a moment ago a time that is the same in every run.
fn settle_times(root: &Path) {
    const LONG_AGO: i64 = 1_100_000_000;
    let changed = snapshot_by_names(root).into_iter().rev();
    for (number, (path, _)) in changed.filter(|(_, object)| object.mtime.0 > LONG_AGO).enumerate() {
        let time = fixed(i64::try_from(number).unwrap() + 1);
        rustix::fs::utimensat(CWD, root.join(path), &time, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
}

fn fill(base: &Path) {
    let at = |path: &str| base.join(path);
    for path in ["kept", "moved/inner", "gone/below"] {
        fs::create_dir_all(at(path)).unwrap();
    }
    for path in ["file", "typed", "other", "kept/file", "moved/inner/file", "gone/below/file"] {
        fs::write(at(path), format!("old {path}")).unwrap();
    }
    fs::hard_link(at("kept/file"), at("kept/twin")).unwrap();
    symlink("old", at("kept/link")).unwrap();
    chown(at("moved/inner/file"), Some(1000), Some(1000)).unwrap();
    rustix::fs::setxattr(at("file"), "user.note", b"old", XattrFlags::empty()).unwrap();
    settle_times(base);
}

/// Changes of every kind.
fn change(branch: &Path) {
    let at = |path: &str| branch.join(path);
    fs::write(at("file"), "new").unwrap();
    rustix::fs::setxattr(at("file"), "user.note", b"new", XattrFlags::empty()).unwrap();
    fs::write(at("kept/added"), "added").unwrap();
    fs::write(at("kept/file"), "longer than before").unwrap();
    fs::set_permissions(at("kept"), Permissions::from_mode(0o700)).unwrap();
    fs::remove_file(at("kept/link")).unwrap();
    symlink("new", at("kept/link")).unwrap();
    fs::remove_file(at("typed")).unwrap();
    fs::create_dir(at("typed")).unwrap();
    fs::write(at("typed/inside"), "typed").unwrap();
    fs::remove_dir_all(at("gone")).unwrap();
    fs::rename(at("moved"), at("elsewhere")).unwrap();
    fs::write(at("elsewhere/inner/file"), "changed").unwrap();
    chown(at("elsewhere/inner/file"), Some(1001), Some(1000)).unwrap();
    fs::hard_link(at("elsewhere/inner/file"), at("elsewhere/twin")).unwrap();
    settle_times(branch);
}

type Tree = BTreeMap<PathBuf, Object>;

/// What users see of a workspace.
#[derive(Clone, PartialEq, Debug)]
struct State {
    base: Tree,
    /// By name; `None` for one that is stale.
    branches: BTreeMap<String, Option<Tree>>,
    /// Names of the commits, and whether they are undone.
    history: Vec<(String, bool)>,
}

impl State {
    fn of(mount: &Mount) -> Self {
        let list = mount.ask("list")["branches"].clone();
        let branches = list.as_array().unwrap_or_else(|| panic!("{list}")).iter().map(|branch| {
            let name = branch["name"].as_str().unwrap().to_owned();
            let is_stale = branch["state"] == "stale";
            let tree = (!is_stale).then(|| tree(&PathBuf::from(branch["path"].as_str().unwrap())));
            (name, tree)
        });
        let branches = branches.collect();
        let history = mount.ask("history")["entries"].clone();
        let history = history.as_array().unwrap_or_else(|| panic!("{history}")).iter();
        let history = history
            .map(|past| (past["branch"].as_str().unwrap().to_owned(), !past["undone"].is_null()));
        Self { base: tree(&mount.base()), branches, history: history.collect() }
    }

    fn assert_is(&self, wanted: &Self, when: &str) {
        assert_same(&self.base, &wanted.base, &format!("{when}: the base"));
        let names = |state: &Self| state.branches.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(self), names(wanted), "{when}: the branches");
        for (name, tree) in &self.branches {
            let wanted = &wanted.branches[name];
            assert_eq!(tree.is_none(), wanted.is_none(), "{when}: branch {name} is stale");
            if let (Some(tree), Some(wanted)) = (tree, wanted) {
                assert_same(tree, wanted, &format!("{when}: branch {name}"));
            }
        }
        assert_eq!(self.history, wanted.history, "{when}: the history");
    }
}

/// A tree with its groups of hard links: the number of links is replaced by the position of the first name.
fn tree(root: &Path) -> Tree {
    let mut tree = snapshot_by_names(root);
    let mut first = BTreeMap::new();
    for (position, (path, object)) in tree.iter_mut().enumerate() {
        if object.nlink > 1 {
            let inode = fs::symlink_metadata(root.join(path)).unwrap().ino();
            object.nlink = *first.entry(inode).or_insert(position as u64 + 2);
        }
    }
    tree
}

/// What a verb answered.
#[derive(PartialEq, Eq, Debug)]
enum Answer {
    Done,
    Failed(String),
}

impl Answer {
    fn of(output: &Output) -> Self {
        if output.status.success() {
            return Self::Done;
        }
        Self::Failed(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Whether an answer leaves open if the verb has taken effect.
fn is_in_doubt(said: &str) -> bool {
    said.contains("partly old and partly new") || said.contains("may or may not have taken effect")
}

/// A mount on which everything has happened up to the verb.
struct Case {
    mount: Mount,
    verb: Verb,
}

impl Case {
    fn new(verb: Verb) -> Self {
        let mount = Mount::over(fill);
        let case = Self { mount, verb };
        match verb {
            Verb::Commit | Verb::PartialCommit | Verb::Abort => {
                case.branch("sibling", "main", |branch| {
                    fs::write(branch.join("other"), "s").unwrap()
                });
                case.branch("work", "main", change);
            }
            Verb::Mount | Verb::Recover => case.branch("work", "main", change),
            Verb::NestedCommit => {
                case.branch("parent", "main", |branch| {
                    fs::write(branch.join("other"), "p").unwrap()
                });
                case.branch("sibling", "parent", |_| ());
                case.branch("work", "parent", change);
            }
            Verb::Undo | Verb::Redo | Verb::Prune => {
                case.commit_to("other", "first");
                case.branch("second", "main", change);
                case.mount.commit("second");
                if verb == Verb::Redo {
                    succeed(&case.mount.run(&["undo"], &[]));
                }
            }
            Verb::Rebase => {
                case.branch("work", "main", change);
                case.commit_to("other", "first");
            }
            Verb::Create | Verb::Import => {}
        }
        if matches!(verb, Verb::Mount | Verb::Recover) {
            case.kill_in_the_middle();
        }
        case
    }

    fn branch(&self, name: &str, parent: &str, change: impl FnOnce(&Path)) {
        succeed(&self.mount.run(&["create", "--parent", parent, name], &[]));
        let found = self.mount.ask("list")["branches"].clone();
        let mut branches = found.as_array().unwrap().iter();
        let branch = branches.find(|branch| branch["name"] == name).unwrap();
        let path = PathBuf::from(branch["path"].as_str().unwrap());
        change(&path);
        settle_times(&path);
    }

    /// Commits a change of this file, whose content is `name` then.
    fn commit_to(&self, file: &str, name: &str) {
        self.branch(name, "main", |branch| fs::write(branch.join(file), name).unwrap());
        self.mount.commit(name);
    }

    /// The daemon dies at one of the middle steps of a commit, and so does its guard.
    fn kill_in_the_middle(&self) {
        common::kill_guard(&self.mount);
        let pid = self.mount.daemon();
        let daemon = rustix::process::Pid::from_raw(pid).unwrap();
        let daemon = rustix::process::pidfd_open(daemon, PidfdFlags::empty()).unwrap();
        let rule = "-einject=renameat2:signal=KILL:when=6".to_owned();
        let trace = Trace::attach(&self.mount, pid, &["-etrace=renameat2".to_owned(), rule]);
        common::refusal(&self.mount.run(&["commit", "work"], &[]));
        trace.wait_for_death(&daemon);
        let flags = rustix::mount::UnmountFlags::DETACH;
        rustix::mount::unmount(self.mount.mountpoint(), flags).unwrap();
        let mut journal = fs::read_dir(self.mount.base().join(".branching/journal")).unwrap();
        assert!(journal.next().is_some(), "it was interrupted");
    }

    /// Runs the verb, traced by these rules. Returns what it answered, and the trace.
    fn run(&self, rules: &[String]) -> (Answer, String) {
        let words: &[&str] = match self.verb {
            Verb::Commit | Verb::NestedCommit => &["commit", "work"],
            Verb::PartialCommit => &["commit", "--only", "typed", "--only", "kept", "work"],
            Verb::Undo => &["undo"],
            Verb::Redo => &["redo"],
            Verb::Rebase => &["rebase", "work"],
            Verb::Create => &["create", "work"],
            Verb::Abort => &["abort", "work"],
            Verb::Prune => &["prune", "--keep", "1"],
            Verb::Import => {
                let mut command = Command::new(common::PROGRAM);
                command.args(["import", "work"]).arg(self.mount.mountpoint());
                command.stdin(self.archive());
                return self.traced(rules, || command.output().unwrap());
            }
            Verb::Mount | Verb::Recover => return self.start(rules),
        };
        self.traced(rules, || self.mount.run(words, &[]))
    }

    /// Runs a command while the daemon is traced by these rules.
    fn traced(&self, rules: &[String], run: impl FnOnce() -> Output) -> (Answer, String) {
        // What the preparation has thrown away is not to be deleted in the trace.
        for place in [self.mount.store(), self.mount.base().join(".branching")] {
            let trash = place.join("trash");
            common::wait_until("the trash is empty", || {
                fs::read_dir(&trash).map_or(0, Iterator::count) == 0
            });
        }
        // The daemon answers this query itself: a fault must not hit it.
        let daemon = self.mount.daemon();
        let trace = Trace::attach(&self.mount, daemon, rules);
        let output = run();
        wait_for_rest(daemon);
        (Answer::of(&output), trace.end())
    }

    fn archive(&self) -> File {
        let directory = self.mount.directory.path();
        common::shell(
            directory,
            "mkdir -p in/new/deep; cd in; echo archived >new/deep/file; ln new/deep/file new/twin; ln -s deep new/link
             touch -hd @1000000000.7 new/* new/deep/file new/deep new .; tar --format=pax -cf ../archive .; rm -r ../in",
        );
        File::open(directory.join("archive")).unwrap()
    }

    /// Starts the program under strace: as a daemon, or to recover.
    fn start(&self, rules: &[String]) -> (Answer, String) {
        let (mut strace, log) = Trace::command(&self.mount, rules);
        let words = match self.verb {
            Verb::Recover => vec!["recover".into(), self.mount.base().into_os_string()],
            _ => {
                let mut words = self.mount.mount_words(&[]);
                words.push(self.mount.mountpoint().into_os_string());
                words
            }
        };
        strace.arg("-f").arg(common::PROGRAM).args(words).env("BRANCHFS_BACKGROUND", "1");
        let mut strace = strace.spawn().unwrap();
        // The daemon says with one byte that it is ready.
        let mut byte = [0; 1];
        let ready = strace.stdout.as_mut().unwrap().read(&mut byte).unwrap();
        let mut errors = strace.stderr.take().unwrap();
        if self.verb == Verb::Mount && ready == 1 {
            return (Answer::Done, Trace { strace, log, _errors: None }.end_with(Signal::KILL));
        }
        let mut said = String::new();
        errors.read_to_string(&mut said).unwrap();
        let status = strace.wait().unwrap();
        let trace = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
        let answer = if status.success() { Answer::Done } else { Answer::Failed(said) };
        (answer, trace)
    }

    /// What must hold after the verb. `old` and `new` are the states before and after it.
    fn check(&self, answer: &Answer, old: &State, new: &State) {
        let mount = &self.mount;
        let is_mounted = !matches!(self.verb, Verb::Mount | Verb::Recover);
        let mut wanted = match answer {
            Answer::Done => vec![new],
            Answer::Failed(_) if !is_mounted => vec![new],
            Answer::Failed(said) if said.contains("was applied") => vec![new],
            Answer::Failed(said) if is_in_doubt(said) => vec![old, new],
            Answer::Failed(_) => vec![old],
        };
        if is_mounted {
            self.check_fail_stop(answer);
        }
        if is_mounted || (self.verb == Verb::Mount && *answer == Answer::Done) {
            mount.unmount();
        }
        if self.verb == Verb::Recover && *answer == Answer::Done {
            let mut journal = fs::read_dir(mount.base().join(".branching/journal")).unwrap();
            assert!(journal.next().is_none(), "it has recovered");
        }
        mount.mount();
        let found = State::of(mount);
        // Commits are forgotten one by one: a prune that failed may have forgotten some of them.
        let between = State { history: found.history.clone(), ..old.clone() };
        if self.verb == Verb::Prune && *answer != Answer::Done {
            wanted.push(&between);
        }
        if !wanted.contains(&&found) {
            found.assert_is(wanted[0], "after the next mount");
        }
        self.commit_to("other", "later");
        let later = State::of(mount);
        let mut wanted = found.base;
        wanted.insert("other".into(), later.base[Path::new("other")].clone());
        assert_same(&later.base, &wanted, "the base after a later commit");
        for _ in 0..2 {
            mount.unmount();
            mount.assert_clean_store("after an unmount");
            mount.mount();
            State::of(mount).assert_is(&later, "after a remount");
        }
    }

    /// The daemon answers, and after an error past the commit point no transaction is accepted before recovery.
    fn check_fail_stop(&self, answer: &Answer) {
        let list = self.mount.ask("list");
        assert!(list["branches"].is_array(), "the daemon does not answer");
        let Answer::Failed(said) = answer else { return };
        if !said.contains("was applied") && !is_in_doubt(said) {
            return;
        }
        let output = self.mount.run(&["create", "probe"], &[]);
        let refused = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            let mut journal = fs::read_dir(self.mount.base().join(".branching/journal")).unwrap();
            assert!(journal.next().is_none(), "accepted before the recovery");
            self.mount.abort("probe");
        } else {
            assert!(refused.contains("no transaction is accepted"), "{refused}");
        }
    }
}

fn is_elsewhere() -> bool {
    module_path!().starts_with("external_store::")
}

/// The trace holds the whole verb: it makes about as many calls that can fail as were once counted for it. A verb that has
/// changed is counted again, from what this prints.
fn check_count(verb: Verb, found: usize) {
    // With the FUSE driver, with a store on another file system, and with the overlay driver.
    let (fuse, elsewhere, overlay) = match verb {
        Verb::Commit => (298, 515, 544),
        Verb::PartialCommit => (613, 833, 1370),
        Verb::NestedCommit => (213, 213, 260),
        Verb::Undo => (200, 201, 200),
        Verb::Redo => (230, 231, 230),
        Verb::Rebase => (257, 478, 748),
        // One write to the branch log. The overlay driver also creates and mounts the layer.
        Verb::Create => (1, 1, 64),
        // The layer is removed in the background, after the answer.
        Verb::Abort => (76, 79, 86),
        Verb::Import => (75, 76, 75),
        Verb::Prune => (89, 80, 77),
        Verb::Mount => (585, 853, 729),
        Verb::Recover => (570, 841, 631),
    };
    let usual: usize = match common::driver() {
        "overlay" => overlay,
        _ if is_elsewhere() => elsewhere,
        _ => fuse,
    };
    // Other kernels and file systems make some calls more or fewer.
    let expected = usual - usual / 5..=usual + usual.div_ceil(5);
    eprintln!("{verb:?}, {}: {found} calls, {usual} expected", common::driver());
    assert!(
        expected.contains(&found),
        "{verb:?}: {found} calls can fail, not {expected:?}: the trace is not of the whole verb, or the verb has changed"
    );
}

/// Runs one verb with one fault after the other.
fn sweep(verb: Verb) {
    let case = Case::new(verb);
    let is_mounted = !matches!(verb, Verb::Mount | Verb::Recover);
    let empty = State { base: Tree::new(), branches: BTreeMap::new(), history: Vec::new() };
    let old = if is_mounted { State::of(&case.mount) } else { empty };
    let servers = if is_mounted { servers(case.mount.daemon()) } else { BTreeSet::new() };
    let (answer, trace) = case.run(&["-etrace=all".to_owned()]);
    assert_eq!(answer, Answer::Done);
    if verb == Verb::Recover {
        case.mount.mount();
    }
    let new = State::of(&case.mount);
    drop(case);
    assert_ne!(old, new);
    let calls: Vec<Call> = calls_of(&trace, &servers).into_iter().collect();
    check_count(verb, calls.len());
    let faults = faults(verb, calls);
    let deadline = common::soak_deadline();
    let (mut count, mut hits, mut failures) = (0, 0, Vec::new());
    for (call, error) in faults.iter().skip(common::soak_skip()) {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            break;
        }
        count += 1;
        let mut when = format!("{verb:?}, BRANCHFS_FAULT={}:{}:{error}", call.name, call.number);
        let mut is_hit = false;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let case = Case::new(verb);
            let (answer, trace) = case.run(&fault(call, error));
            // A thread of the daemon may do less than the last time.
            is_hit = trace.contains("INJECTED");
            for line in trace.lines().filter(|line| line.contains("INJECTED")) {
                when.push_str(&format!("\n  {line}"));
            }
            when.push_str(&format!("\n  {answer:?}"));
            if trace.lines().any(|line| line.contains("INJECTED") && line.contains("/dev/fuse")) {
                return; // a daemon without the kernel's device ends: no call of the verb
            }
            case.check(&answer, &old, &new);
        }));
        hits += usize::from(is_hit);
        if let Err(panic) = outcome {
            let said = panic.downcast_ref::<String>().map_or("a panic", String::as_str);
            eprintln!("{when}\n  {said}");
            failures.push(when);
        }
    }
    let place = if is_elsewhere() { "external store" } else { common::driver() };
    eprintln!("{verb:?}, {place}: {count} runs, {hits} faults; {} in all", faults.len());
    assert!(failures.is_empty(), "{} of {count} runs:\n{}", failures.len(), failures.join("\n"));
    let is_left_out = !faults.is_empty() && common::soak_skip() >= faults.len();
    assert!(is_left_out || hits * 2 > count, "{verb:?}: only {hits} of {count} calls failed");
}

/// The faults to try: all in a soak, an evenly spread sample of the calls otherwise, or a given one.
fn faults(verb: Verb, calls: Vec<Call>) -> Vec<(Call, &'static str)> {
    /// Of a verb, a driver and a place of the store.
    const SAMPLE: usize = 5;
    if let Ok(one) = std::env::var("BRANCHFS_FAULT") {
        let parts: Vec<&str> = one.split(':').collect();
        let call = Call { name: parts[0].to_owned(), number: parts[1].parse().unwrap() };
        return vec![(call, ERRORS.into_iter().find(|error| *error == parts[2]).unwrap())];
    }
    let count = calls.len();
    // Neighbours are alike, so a part of a soak is spread evenly too.
    let far = (1..count).rev().find(|far| far * 5 < count * 3 && is_coprime(*far, count));
    let at = |run: usize| run * far.unwrap_or(1) % count;
    let number = |at: usize| ERRORS[at % ERRORS.len()];
    let fault = |run: usize| (calls[at(run)].clone(), number(at(run)));
    let found = FOUND.into_iter().filter(|(of, ..)| *of == verb);
    let found =
        found.map(|(_, name, number, error)| (Call { name: name.to_owned(), number }, error));
    let found = found.filter(|(call, _)| calls.contains(call));
    let once = (0..common::rounds(SAMPLE.min(count), count)).map(fault);
    let others = (0..common::rounds(0, count)).flat_map(|run| {
        let call = &calls[at(run)];
        told_apart(&call.name)
            .iter()
            .filter(move |error| alike(error) != alike(number(at(run))))
            .map(|error| (call.clone(), *error))
    });
    found.chain(once).chain(others).collect()
}

/// Numbers that mean the same to the engine wherever it looks at one of them.
fn alike(error: &str) -> &str {
    if error == "EDQUOT" { "ENOSPC" } else { error }
}

/// The numbers that the engine tells from others where a call of this name fails. It hands all others on as they are.
fn told_apart(call: &str) -> &'static [&'static str] {
    match call {
        // Layers that the kernel refuses, and content that it cannot find, are read in another way.
        "openat2" | "openat" => &["EIO", "ENOSPC", "EPERM"],
        "statx" => &["EIO"],
        "fsconfig" | "fsmount" | "move_mount" | "open_tree" | "mount_setattr" => &["EIO", "EPERM"],
        // Logs and probes on a full disk.
        "write" | "pwrite64" | "mkdirat" | "mkdir" | "mknodat" | "setxattr" | "lsetxattr"
        | "fsetxattr" | "fallocate" | "ftruncate" => &["EIO", "ENOSPC", "EPERM"],
        // What a file system or a sandbox does not permit is done in another way.
        "unlinkat" | "unlink" | "rmdir" | "linkat" | "renameat2" | "rename" | "fchmod"
        | "fchmodat" | "fchown" | "fchownat" | "lremovexattr" | "fremovexattr" | "ioctl"
        | "fsopen" | "fspick" | "mount" | "open_by_handle_at" | "name_to_handle_at" => {
            &["EIO", "EPERM"]
        }
        _ => &[],
    }
}

fn is_coprime(one: usize, other: usize) -> bool {
    if other == 0 { one == 1 } else { is_coprime(other, one % other) }
}

/// Runs a verb that panics at each of these points, and says whether it has taken effect then.
fn panics(verb: Verb, points: &[(&str, bool)]) {
    let case = Case::new(verb);
    let old = State::of(&case.mount);
    assert_eq!(case.run(&["-etrace=none".to_owned()]).0, Answer::Done);
    let new = State::of(&case.mount);
    drop(case);
    for (point, is_new) in points {
        let case = Case::new(verb);
        case.mount.unmount();
        let mut mount = Command::new(common::PROGRAM);
        mount.args(case.mount.mount_words(&[])).arg(case.mount.mountpoint());
        succeed(&mount.env("BRANCHFS_PANIC_ON", point).output().unwrap());
        let (answer, _) = case.run(&["-etrace=none".to_owned()]);
        let Answer::Failed(said) = &answer else { panic!("{point}: {answer:?}") };
        assert!(said.contains("internal error of the daemon"), "{point}: {said}");
        assert!(case.mount.ask("history")["entries"].is_array(), "{point}: it answers");
        let log = fs::read_to_string(case.mount.store().join("branchfs.log")).unwrap();
        assert!(log.contains(&format!("injected panic: {point}")), "{point}: {log}");
        assert!(log.contains("panic_if_listed"), "{point}: a backtrace: {log}");
        let refused = common::refusal(&case.mount.run(&["create", "probe"], &[]));
        assert!(refused.contains("no transaction is accepted"), "{point}: {refused}");
        let wanted = if *is_new { &new } else { &old };
        let outcome = catch_unwind(AssertUnwindSafe(|| case.check(&answer, wanted, wanted)));
        assert!(outcome.is_ok(), "{verb:?} panics at {point}");
    }
}

const TRANSACTION: [(&str, bool); 10] = [
    ("transaction-planned", false),
    ("transaction-prepared", false),
    ("transaction-locked", false),
    ("transaction-decided", true),
    ("transaction-half-applied", true),
    ("transaction-applied", true),
    ("transaction-visible", true),
    ("transaction-recorded", true),
    ("transaction-synced", true),
    ("transaction-kept", true),
];

#[test]
fn a_commit_is_all_or_nothing_whichever_phase_of_it_panics() {
    panics(Verb::Commit, &TRANSACTION);
}

#[test]
fn a_nested_commit_is_all_or_nothing_whichever_phase_of_it_panics() {
    let points = ["nested-commit-locked", "nested-commit-decided", "nested-commit-visible"];
    panics(Verb::NestedCommit, &points.map(|point| (point, point != "nested-commit-locked")));
}

#[test]
fn an_undo_is_all_or_nothing_whichever_phase_of_it_panics() {
    panics(Verb::Undo, &TRANSACTION);
}

macro_rules! sweeps {
    ($($name:ident: $verb:expr;)*) => {
        $(
            #[test]
            fn $name() {
                sweep($verb);
            }
        )*
    };
}

sweeps! {
    a_commit_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::Commit;
    a_partial_commit_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::PartialCommit;
    a_nested_commit_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::NestedCommit;
    an_undo_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::Undo;
    a_redo_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::Redo;
    a_rebase_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::Rebase;
    a_create_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::Create;
    an_abort_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::Abort;
    an_import_is_all_or_nothing_whichever_call_of_the_daemon_fails: Verb::Import;
    a_prune_forgets_whole_commits_whichever_call_of_the_daemon_fails: Verb::Prune;
    a_mount_after_a_kill_can_be_repeated_whichever_call_fails: Verb::Mount;
    a_recovery_without_a_mount_can_be_repeated_whichever_call_fails: Verb::Recover;
}
