//! Each file system call of a verb fails once: afterwards the base is old or new, never between, the answer says which,
//! later commits stay, and the store is clean.
//!
//! All calls are counted, those of the background thread too, and one of them fails ([`crate::faults`]). On tmpfs, where
//! a sync costs nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Seek;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{
    BranchRef, CommitOptions, MAIN_BRANCH, Policy, Resolution, Settings, UndoDirection, Workspace,
};
use crate::archive::OwnershipPolicy;
use crate::error::Error;
use crate::faults::with_faults;
use crate::path_filter::PathFilter;
use crate::transaction::step_crash_tests::{make, remove_tree, rename, shown, unlink, write};
use crate::view::{New, View};

const ERRORS: [i32; 4] = [libc::EIO, libc::ENOSPC, libc::EPERM, libc::EDQUOT];

/// Where the store is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Store {
    Inside,
    Elsewhere,
}

/// What runs with the fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verb {
    Commit,
    /// The branch continues with the rest.
    PartialCommit,
    /// Another branch lives on and gets a snapshot layer.
    CommitWithObserver,
    /// A commit that ends the redo of an undone one.
    CommitAfterUndo,
    NestedCommit,
    Undo,
    Redo,
    Create,
    Abort,
    Import,
    Prune,
    Rebase,
    Mount,
    /// A mount that finds a commit interrupted in the middle.
    Recover,
}

use Verb::{
    Abort, Commit, CommitAfterUndo, CommitWithObserver, Create, Import, Mount, NestedCommit,
    PartialCommit, Prune, Rebase, Recover, Redo, Undo,
};

type Tree = BTreeMap<PathBuf, String>;

/// A call that was made to fail.
#[derive(Clone, Copy, Debug)]
struct Fault {
    #[expect(dead_code, reason = "printed")]
    call: libc::c_long,
    after_commit_point: bool,
}

struct Case {
    directory: tempfile::TempDir,
    elsewhere: Option<tempfile::TempDir>,
    verb: Verb,
}

fn named(name: &str) -> BranchRef {
    BranchRef::Name(name.to_owned())
}

fn ok<T>(outcome: Result<T, Error>) -> Result<(), Error> {
    outcome.map(drop)
}

fn snapshot(root: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut left = vec![root.to_path_buf()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let shown = path.strip_prefix(root).unwrap().to_path_buf();
            if shown == Path::new(".branching") {
                continue;
            }
            let found = fs::symlink_metadata(&path).unwrap();
            let content = if found.is_dir() {
                left.push(path.clone());
                String::new()
            } else if found.is_symlink() {
                fs::read_link(&path).unwrap().display().to_string()
            } else {
                fs::read_to_string(&path).unwrap()
            };
            tree.insert(shown, format!("{:o} {content}", found.mode()));
        }
    }
    tree
}

/// Changes of all kinds that a plan knows.
fn change(view: &mut View) {
    write(view, "file", "new");
    unlink(view, "typed");
    make(view, "typed", New::Directory { mode: 0o750 });
    write(view, "typed/inside", "typed");
    remove_tree(view, "gone");
    rename(view, "moved", "elsewhere");
    write(view, "elsewhere/file", "changed");
    write(view, "kept/added", "added");
}

impl Case {
    /// Everything up to the call of the verb.
    fn new(verb: Verb, store: Store) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let elsewhere = (store == Store::Elsewhere).then(|| tempfile::tempdir().unwrap());
        let case = Self { directory, elsewhere, verb };
        let base = case.base();
        for path in ["", "kept", "moved", "gone"] {
            fs::create_dir(base.join(path)).unwrap();
        }
        for path in ["file", "typed", "untouched", "kept/file", "moved/file", "gone/file"] {
            fs::write(base.join(path), "old").unwrap();
        }
        let workspace = case.open();
        match verb {
            Mount => {}
            Commit | PartialCommit | Abort => case.branch(&workspace, "work", MAIN_BRANCH, change),
            CommitWithObserver => {
                case.branch(&workspace, "observer", MAIN_BRANCH, |view| {
                    write(view, "observed", "observer");
                });
                case.branch(&workspace, "work", MAIN_BRANCH, change);
            }
            CommitAfterUndo | Prune | Undo | Redo => {
                case.commit_other(&workspace, "first");
                case.branch(&workspace, "second", MAIN_BRANCH, change);
                workspace.commit(&named("second"), &CommitOptions::default()).unwrap();
                if matches!(verb, Redo | CommitAfterUndo) {
                    workspace.revert(UndoDirection::Undo, None, false, false).unwrap();
                }
                if verb == CommitAfterUndo {
                    case.branch(&workspace, "work", MAIN_BRANCH, change);
                }
            }
            NestedCommit => {
                case.branch(&workspace, "parent", MAIN_BRANCH, |view| write(view, "p", "parent"));
                let parent = workspace.list().unwrap()[0].id;
                case.branch(&workspace, "rival", parent, |view| write(view, "r", "rival"));
                case.branch(&workspace, "work", parent, change);
            }
            Create | Import => {}
            Rebase => {
                case.branch(&workspace, "work", MAIN_BRANCH, change);
                case.commit_other(&workspace, "first");
            }
            Recover => {
                case.branch(&workspace, "work", MAIN_BRANCH, change);
                let (disk, header, plan) =
                    workspace.plan_for_tests("work", PathFilter::default()).unwrap();
                let decided = crate::transaction::Prepared::new(&disk, plan).unwrap();
                let decided = decided.log(&disk, header).unwrap();
                decided.run_half_for_tests(&disk).unwrap();
            }
        }
        case
    }

    fn base(&self) -> PathBuf {
        self.directory.path().join("base")
    }

    fn store(&self) -> Option<PathBuf> {
        self.elsewhere.as_ref().map(|place| place.path().join("store"))
    }

    fn settings(&self) -> Settings {
        let policy = match self.verb {
            CommitWithObserver => Policy::Snapshot,
            _ => Policy::FirstWinner,
        };
        Settings { policy, ..Settings::default() }
    }

    fn open(&self) -> Workspace {
        Workspace::open_again(&self.base(), self.store().as_deref(), self.settings())
    }

    fn branch(
        &self,
        workspace: &Workspace,
        name: &str,
        parent: u64,
        change: impl FnOnce(&mut View),
    ) {
        workspace.create(name, &BranchRef::Id(parent)).unwrap();
        let slot =
            workspace.table.lock().values().find(|one| one.record.name == name).unwrap().slot;
        change(&mut workspace.table.mount.mounted(slot).unwrap().lock());
    }

    fn commit_other(&self, workspace: &Workspace, name: &str) {
        self.branch(workspace, name, MAIN_BRANCH, |view| write(view, name, name));
        workspace.commit(&named(name), &CommitOptions::default()).unwrap();
    }

    fn run(&self, workspace: &Workspace, archive: fs::File) -> Result<(), Error> {
        let options = CommitOptions::default();
        match self.verb {
            Commit | CommitWithObserver | CommitAfterUndo | NestedCommit => {
                ok(workspace.commit(&named("work"), &options))
            }
            PartialCommit => {
                let selection = PathFilter::new(&["typed".to_owned(), "kept".to_owned()], &[]);
                let selection = selection.unwrap();
                ok(workspace.commit(&named("work"), &CommitOptions { selection, ..options }))
            }
            Undo => ok(workspace.revert(UndoDirection::Undo, None, false, false)),
            Redo => ok(workspace.revert(UndoDirection::Redo, None, false, false)),
            Create => ok(workspace.create("work", &BranchRef::Id(MAIN_BRANCH))),
            Abort => workspace.abort(&named("work")),
            Import => {
                let main = BranchRef::Id(MAIN_BRANCH);
                ok(workspace.import("work", &main, archive, &OwnershipPolicy::All, false, None))
            }
            Prune => ok(workspace.prune(1)),
            Rebase => ok(workspace.rebase(&named("work"), Resolution::Refuse, false)),
            Mount | Recover => unreachable!("the workspace is opened with the fault"),
        }
    }

    /// Runs the verb; its call number `at`, counted from 1, fails with `error`. Returns the outcome, the fault, and how many calls there
    /// were.
    fn run_with_fault(
        &self,
        at: usize,
        error: i32,
        archive: fs::File,
    ) -> (Result<(), Error>, Option<Fault>, usize) {
        let journal = self.base().join(".branching/journal");
        let (mut count, mut fault) = (0, None);
        let decide = |call| {
            count += 1;
            if count != at {
                return None;
            }
            let mut entries = fs::read_dir(&journal).into_iter().flatten().flatten();
            let after_commit_point = entries.any(|entry| entry.path().join("plan").exists());
            fault = Some(Fault { call, after_commit_point });
            Some(error)
        };
        let outcome = with_faults(decide, |faults| {
            if matches!(self.verb, Mount | Recover) {
                faults.begin();
                let store = self.store();
                return ok(Workspace::open(&self.base(), store.as_deref(), self.settings()));
            }
            // Its background thread is started here, and is watched too.
            let workspace = self.open();
            faults.begin();
            self.run(&workspace, archive)
        });
        (outcome, fault, count)
    }

    fn names(&self, workspace: &Workspace) -> BTreeSet<String> {
        let state = |is_stale| if is_stale { "stale" } else { "live" };
        let branches = workspace.list().unwrap().into_iter();
        branches.map(|branch| format!("{} {}", branch.name, state(branch.is_stale))).collect()
    }

    fn check_store(&self, when: &str) {
        let damages = crate::fsck::check(&self.base(), false).unwrap();
        assert!(damages.is_empty(), "{when}: {damages:?}");
    }

    /// Mounts again, commits something else, mounts twice. `outcome` is what the verb answered.
    fn check(&self, outcome: &Result<(), Error>, old: &State, new: &State, when: &str) {
        let mut workspace = self.open();
        let found = State::of(self, &workspace);
        let wanted: &[&State] = match outcome {
            Ok(()) | Err(Error::Incomplete { .. }) => &[new],
            Err(Error::InDoubt { .. }) => &[old, new],
            Err(_) if matches!(self.verb, Recover | Mount) => &[new],
            Err(_) => &[old],
        };
        // Commits are forgotten one by one: a prune that failed may have forgotten some of them.
        let is_between = self.verb == Prune && outcome.is_err();
        assert!(
            wanted.contains(&&found) || is_between && found.base == old.base,
            "{when}:\nfound  {found:?}\nwanted {wanted:?}"
        );
        let mut wanted = found.base;
        self.commit_other(&workspace, "later");
        wanted.insert("later".into(), wanted[Path::new("untouched")].replace("old", "later"));
        for _ in 0..2 {
            drop(workspace);
            self.check_store(when);
            workspace = self.open();
            assert_eq!(snapshot(&self.base()), wanted, "{when}: after a later commit");
        }
        if matches!(self.verb, NestedCommit | Rebase) {
            return;
        }
        // What is undone leads back through states that there were.
        workspace.revert(UndoDirection::Undo, None, true, false).unwrap();
        wanted.remove(Path::new("later"));
        assert_eq!(snapshot(&self.base()), wanted, "{when}: after the undo of the later commit");
    }
}

/// What others see of a workspace.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
struct State {
    base: Tree,
    branches: BTreeSet<String>,
    /// What live branches show.
    shown: BTreeMap<String, Tree>,
    /// Commits that can be undone, and undone ones.
    history: (usize, usize),
    /// The layers of the branch that a nested commit goes into.
    layers: usize,
}

impl State {
    fn of(case: &Case, workspace: &Workspace) -> Self {
        let history = workspace.history().unwrap();
        let undone = history.iter().filter(|past| past.undone.is_some()).count();
        let branches = workspace.table.lock();
        let parent = branches.values().find(|branch| branch.record.name == "parent");
        let layers = parent.map_or(0, |parent| parent.record.layers.len());
        let live = branches.values().filter(|branch| !branch.record.is_stale);
        let show = |branch: &super::Branch| {
            let mounted = workspace.table.mount.mounted(branch.slot).unwrap();
            (branch.record.name.clone(), shown(&mut mounted.lock()))
        };
        let shown = live.map(|branch| show(branch)).collect();
        drop(branches);
        Self {
            base: snapshot(&case.base()),
            shown,
            branches: case.names(workspace),
            history: (history.len() - undone, undone),
            layers,
        }
    }
}

/// Every call fails once with every error in `scripts/test --soak`; otherwise every `stride`th, with one error after the
/// other. `BRANCHFS_SEED` shifts both by that number; without it each run tries the same calls.
fn sweep(verb: Verb, stride: usize) {
    for store in [Store::Inside, Store::Elsewhere] {
        sweep_store(verb, store, stride);
    }
}

fn archive() -> fs::File {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("new")).unwrap();
    fs::write(directory.path().join("new/file"), "from the archive").unwrap();
    let path = directory.path().with_extension("tar");
    let mut tar = std::process::Command::new("tar");
    let made = tar.arg("-cf").arg(&path).arg("-C").arg(directory.path()).arg("new").status();
    assert!(made.unwrap().success());
    let file = fs::File::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    file
}

fn sweep_store(verb: Verb, store: Store, stride: usize) {
    let archive = archive();
    let handed = || {
        let mut file = archive.try_clone().unwrap();
        file.rewind().unwrap();
        file
    };
    // Without a fault.
    let case = Case::new(verb, store);
    let old = if matches!(verb, Mount | Recover) {
        State::default()
    } else {
        State::of(&case, &case.open())
    };
    let (outcome, _, calls) = case.run_with_fault(usize::MAX, 0, handed());
    outcome.unwrap();
    let new = State::of(&case, &case.open());
    if !matches!(verb, Create | Abort | Import | Prune | Rebase | NestedCommit | Mount) {
        assert_ne!(old.base, new.base, "{verb:?}");
    }
    drop(case);
    let is_soak = std::env::var_os("BRANCHFS_SOAK").is_some();
    let seed = std::env::var("BRANCHFS_SEED").map_or(0, |seed| seed.parse::<usize>().unwrap());
    let (stride, rounds) = if is_soak { (1, ERRORS.len()) } else { (stride, 1) };
    let (mut hits, mut late) = (0, 0);
    for round in 0..rounds {
        for at in (1 + seed % stride..=calls).step_by(stride) {
            let error = ERRORS[(at / stride + seed + round) % ERRORS.len()];
            let case = Case::new(verb, store);
            let (outcome, fault, _) = case.run_with_fault(at, error, handed());
            let Some(fault) = fault else { continue }; // the background did more the last time
            let when = format!(
                "BRANCHFS_SEED={seed}, {verb:?}, store {store:?}, call {at} of {calls} ({fault:?}) fails with {error}: {outcome:?}"
            );
            case.check(&outcome, &old, &new, &when);
            hits += 1;
            late += usize::from(fault.after_commit_point);
        }
    }
    eprintln!(
        "{verb:?}, store {store:?}: {hits} faults in {calls} calls, {late} after the commit point"
    );
    assert!(hits * stride >= calls / 2 || calls < 20, "{verb:?}: {hits} faults in {calls} calls");
    let has_journal =
        matches!(verb, Commit | PartialCommit | CommitWithObserver | CommitAfterUndo | Undo | Redo);
    assert!(!has_journal || late * stride > 20, "{verb:?}: {late} faults after the commit point");
}

macro_rules! sweeps {
    ($($name:ident: $verb:expr, $stride:expr;)*) => {
        $(
            #[test]
            fn $name() {
                sweep($verb, $stride);
            }
        )*
    };
}

sweeps! {
    a_commit_is_all_or_nothing_whichever_call_fails: Commit, 7;
    a_partial_commit_is_all_or_nothing_whichever_call_fails: PartialCommit, 11;
    a_commit_with_an_observer_is_all_or_nothing_whichever_call_fails: CommitWithObserver, 11;
    a_commit_after_an_undo_is_all_or_nothing_whichever_call_fails: CommitAfterUndo, 11;
    a_nested_commit_is_all_or_nothing_whichever_call_fails: NestedCommit, 5;
    an_undo_is_all_or_nothing_whichever_call_fails: Undo, 7;
    a_redo_is_all_or_nothing_whichever_call_fails: Redo, 7;
    a_create_is_all_or_nothing_whichever_call_fails: Create, 3;
    an_abort_is_all_or_nothing_whichever_call_fails: Abort, 3;
    an_import_is_all_or_nothing_whichever_call_fails: Import, 5;
    a_prune_forgets_whole_commits_whichever_call_fails: Prune, 5;
    a_rebase_is_all_or_nothing_whichever_call_fails: Rebase, 7;
    a_mount_changes_nothing_whichever_call_fails: Mount, 7;
    a_recovery_can_be_repeated_whichever_call_fails: Recover, 11;
}
