//! Power is cut after every step of a commit, of taking one back, and of recovery itself: the base found afterwards is
//! entirely new or entirely old.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::RenameFlags;

use super::journal::{Header, LoggedTransaction, Prepared};
use super::journal_recovery::recover;
use super::step::{Direction, Location};
use super::{Plan, Step, TransactionRoots};
use crate::path_filter::PathFilter;
use crate::view::{New, NodeIndex, Owner, ROOT, View};
use crate::workspace::{BranchRef, CommitOptions, Settings, UndoDirection, Workspace};

/// A base with one of everything, and a branch that changes it in every way a plan knows.
pub(super) struct Scenario {
    directory: tempfile::TempDir,
    /// Another file system, on which the store is.
    elsewhere: Option<tempfile::TempDir>,
}

/// Where the store is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Store {
    Inside,
    Elsewhere,
}

use Store::{Elsewhere, Inside};

/// What of the branch is committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    All,
    /// Some of each kind of change.
    Mixed,
}

impl Part {
    fn selection(self) -> PathFilter {
        const LEFT: [&str; 9] = [
            "/kept/file",
            "/typed/inside",
            "/gone/below",
            "/replaced/new",
            "/second name",
            "/link",
            "/swap-a",
            "/swap-b",
            "/new/place/inner/file",
        ];
        match self {
            Self::All => PathFilter::default(),
            Self::Mixed => PathFilter::new(&[], &LEFT.map(str::to_owned)).unwrap(),
        }
    }
}

const OWNER: Owner = Owner { uid: 0, gid: 0 };

impl Scenario {
    fn new(place: Store) -> Self {
        let elsewhere = (place == Elsewhere).then(|| tempfile::tempdir_in("/dev/shm").unwrap());
        let scenario = Self { directory: tempfile::tempdir().unwrap(), elsewhere };
        let base = scenario.base();
        for path in [
            "",
            "kept",
            "moved",
            "moved/inner",
            "gone",
            "gone/below",
            "replaced",
            "swap-a",
            "swap-b",
        ] {
            fs::create_dir(base.join(path)).unwrap();
        }
        for path in [
            "file",
            "typed",
            "kept/file",
            "moved/file",
            "moved/inner/file",
            "gone/below/file",
            "replaced/old",
            "swap-a/a",
            "swap-b/b",
        ] {
            fs::write(base.join(path), format!("old {path}")).unwrap();
        }
        symlink("file", base.join("link")).unwrap();
        scenario
    }

    pub(super) fn base(&self) -> PathBuf {
        self.directory.path().join("base")
    }

    fn open(&self) -> Workspace {
        let store = self.elsewhere.as_ref().map(|place| place.path().join("store"));
        Workspace::open_again(&self.base(), store.as_deref(), Settings::default())
    }

    /// Forks and changes; the workspace is closed again without a commit.
    fn work(&self) {
        let workspace = self.open();
        workspace.create("branch", &BranchRef::Id(0)).unwrap();
        let mounted = workspace.mount().mounted(1).unwrap();
        let mut view = mounted.lock();
        let view = &mut *view;
        write(view, "file", "new");
        write(view, "kept/file", "new, longer than before");
        write(view, "kept/added", "added");
        unlink(view, "typed");
        make(view, "typed", New::Directory { mode: 0o750 });
        write(view, "typed/inside", "typed");
        remove_tree(view, "gone");
        rename(view, "moved", "elsewhere");
        write(view, "elsewhere/inner/file", "changed after the move");
        make(view, "new", New::Directory { mode: 0o755 });
        rename(view, "elsewhere", "new/place");
        remove_tree(view, "replaced");
        make(view, "replaced", New::Directory { mode: 0o700 });
        write(view, "replaced/new", "new");
        rename(view, "swap-a", "swap");
        rename(view, "swap-b", "swap-a");
        rename(view, "swap", "swap-b");
        unlink(view, "link");
        make(view, "link", New::Symlink { target: OsStr::new("kept") });
        write(view, "first name", "linked");
        let linked = find(view, "first name");
        view.link(linked, ROOT, OsStr::new("second name")).unwrap();
    }

    /// Plans the branch's commit as the daemon would, in a workspace that is gone afterwards.
    fn plan(&self, part: Part) -> (TransactionRoots, Header, Plan) {
        let workspace = self.open();
        workspace.plan_for_tests("branch", part.selection()).unwrap()
    }

    /// What the branch shows, in a workspace that is gone afterwards; nothing where there is none.
    fn shown(&self) -> Option<BTreeMap<PathBuf, String>> {
        let workspace = self.open();
        (!workspace.list().unwrap().is_empty())
            .then(|| shown(&mut workspace.mount().mounted(1).unwrap().lock()))
    }

    pub(super) fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let mut tree = BTreeMap::new();
        visit(&self.base(), Path::new(""), &mut tree);
        tree
    }

    /// Starts again, as after a crash, and ends in good order.
    fn restart(&self) {
        let workspace = self.open();
        let base_store = self.base().join(".branching");
        let count = |path: PathBuf| fs::read_dir(path).unwrap().count();
        assert_eq!(count(base_store.join("journal")), 0, "nothing is left to settle");
        if self.elsewhere.is_some() {
            assert_eq!(count(base_store.join("layers")), 0, "no copy is left");
        }
        let branches = workspace.list().unwrap().len();
        assert_eq!(count(workspace.store().join("layers")), branches, "no layer is left");
        assert!(!workspace.store().join("lost").exists(), "nothing is taken for lost");
    }
}

fn visit(root: &Path, path: &Path, tree: &mut BTreeMap<PathBuf, String>) {
    let full = root.join(path);
    let metadata = fs::symlink_metadata(&full).unwrap();
    let content = if metadata.is_dir() {
        for entry in fs::read_dir(&full).unwrap() {
            let name = entry.unwrap().file_name();
            if name != ".branching" {
                visit(root, &path.join(name), tree);
            }
        }
        String::new()
    } else if metadata.is_symlink() {
        fs::read_link(&full).unwrap().display().to_string()
    } else {
        fs::read_to_string(&full).unwrap()
    };
    let links = if metadata.is_dir() { 0 } else { metadata.nlink() };
    let (mode, seconds, nanoseconds) = (metadata.mode(), metadata.mtime(), metadata.mtime_nsec());
    tree.insert(path.to_path_buf(), format!("{mode:o} {links} {seconds}.{nanoseconds} {content}"));
}

pub(crate) fn parent(view: &mut View, path: &str) -> (NodeIndex, String) {
    let mut at = ROOT;
    let mut parts: Vec<&str> = path.split('/').collect();
    let name = parts.pop().unwrap().to_owned();
    for part in parts {
        at = view.tree.lookup(at, OsStr::new(part)).unwrap().unwrap().0;
        view.tree.nodes.add_lookup(at);
    }
    (at, name)
}

pub(crate) fn find(view: &mut View, path: &str) -> NodeIndex {
    let (parent, name) = parent(view, path);
    let found = view.tree.lookup(parent, OsStr::new(&name)).unwrap().unwrap().0;
    view.tree.nodes.add_lookup(found);
    found
}

pub(crate) fn make(view: &mut View, path: &str, new: New<'_>) {
    let (parent, name) = parent(view, path);
    let (index, _, _) = view.create(parent, OsStr::new(&name), new, 0, OWNER).unwrap();
    view.tree.nodes.add_lookup(index);
}

pub(crate) fn write(view: &mut View, path: &str, content: &str) {
    let (parent, name) = parent(view, path);
    if view.tree.lookup(parent, OsStr::new(&name)).unwrap().is_none() {
        make(view, path, New::File { mode: 0o644 });
    }
    let index = find(view, path);
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::TRUNC;
    let opened = view.open(index, flags, false, None).unwrap();
    let file = view.tree.handles.file(opened.handle).unwrap();
    rustix::io::write(&*file, content.as_bytes()).unwrap();
    view.close(opened.handle);
}

pub(crate) fn unlink(view: &mut View, path: &str) {
    let (parent, name) = parent(view, path);
    view.unlink(parent, OsStr::new(&name)).unwrap();
}

pub(crate) fn remove_tree(view: &mut View, path: &str) {
    let index = find(view, path);
    for entry in view.tree.list(index).unwrap() {
        let below = format!("{path}/{}", entry.name.to_str().unwrap());
        if entry.kind == rustix::fs::FileType::Directory {
            remove_tree(view, &below)
        } else {
            unlink(view, &below)
        }
    }
    let (parent, name) = parent(view, path);
    view.rmdir(parent, OsStr::new(&name)).unwrap();
}

pub(crate) fn rename(view: &mut View, from: &str, to: &str) {
    let (source, target) = (parent(view, from), parent(view, to));
    view.rename(
        (source.0, OsStr::new(&source.1)),
        (target.0, OsStr::new(&target.1)),
        RenameFlags::empty(),
    )
    .unwrap();
}

/// Everything that a view shows: modes and content.
pub(crate) fn shown(view: &mut View) -> BTreeMap<PathBuf, String> {
    let mut tree = BTreeMap::new();
    let mut pending = vec![(PathBuf::new(), ROOT)];
    while let Some((directory, index)) = pending.pop() {
        for entry in view.tree.list(index).unwrap() {
            let path = directory.join(&entry.name);
            let (found, attributes) = view.tree.lookup(index, &entry.name).unwrap().unwrap();
            view.tree.nodes.add_lookup(found);
            let mut content = Vec::new();
            match entry.kind {
                rustix::fs::FileType::Directory => pending.push((path.clone(), found)),
                rustix::fs::FileType::Symlink => content = view.readlink(found).unwrap(),
                _ => {
                    let opened = view.open(found, rustix::fs::OFlags::RDONLY, false, None).unwrap();
                    let file = view.tree.handles.file(opened.handle).unwrap();
                    content.resize(usize::try_from(attributes.size).unwrap(), 0);
                    rustix::io::pread(&*file, &mut content[..], 0).unwrap();
                    view.close(opened.handle);
                }
            }
            let links =
                if entry.kind == rustix::fs::FileType::Directory { 0 } else { attributes.nlink };
            let content = String::from_utf8(content).unwrap();
            tree.insert(path, format!("{:o} {links} {content}", attributes.mode));
        }
    }
    tree
}

/// Forks, changes and logs; returns the scenario, its disk, the logged commit and the base before.
pub(super) fn decided(
    place: Store,
) -> (Scenario, TransactionRoots, LoggedTransaction, BTreeMap<PathBuf, String>) {
    decided_part(place, Part::All)
}

fn decided_part(
    place: Store,
    part: Part,
) -> (Scenario, TransactionRoots, LoggedTransaction, BTreeMap<PathBuf, String>) {
    let scenario = Scenario::new(place);
    let before = scenario.snapshot();
    scenario.work();
    let (disk, header, plan) = scenario.plan(part);
    assert!(plan.drift.is_empty(), "{:?}", plan.drift);
    for whiteout in &plan.stray_whiteouts {
        disk.remove_file(whiteout).unwrap();
    }
    let decided = Prepared::new(&disk, plan).unwrap().log(&disk, header).unwrap();
    (scenario, disk, decided, before)
}

/// What must not depend on the run: everything but the times of what was written just now.
pub(super) fn without_times(tree: &BTreeMap<PathBuf, String>) -> BTreeMap<PathBuf, String> {
    let strip = |text: &String| {
        text.split(' ')
            .enumerate()
            .filter(|(at, _)| *at != 2)
            .map(|(_, word)| word.to_owned() + " ")
            .collect()
    };
    tree.iter().map(|(path, text)| (path.clone(), strip(text))).collect()
}

#[test]
fn a_decided_commit_rolls_forward_from_every_step() {
    sweep_decided_commit(Inside);
    sweep_decided_commit(Elsewhere);
}

fn sweep_decided_commit(place: Store) {
    let (scenario, disk, commit, before) = decided(place);
    commit.apply(&disk).unwrap();
    let wanted = without_times(&scenario.snapshot());
    assert_ne!(wanted, without_times(&before));
    assert!(wanted.contains_key(Path::new("new/place/inner/file")), "{wanted:#?}");
    let steps = commit.steps.len();
    assert_eq!(steps, 27, "the scenario uses every kind of step: {:#?}", commit.steps);
    for done in 0..=steps {
        let (scenario, disk, commit, _) = decided(place);
        commit.steps[..done].iter().for_each(|step| step.run(&disk, Direction::Forward).unwrap());
        scenario.restart();
        assert_eq!(
            without_times(&scenario.snapshot()),
            wanted,
            "power cut after {done} of {steps} steps"
        );
    }
}

#[test]
fn a_move_into_the_base_of_which_the_disk_has_both_names_is_completed() {
    let (scenario, disk, commit, _) = decided(Inside);
    commit.apply(&disk).unwrap();
    let wanted = without_times(&scenario.snapshot());
    let mut moves = 0;
    for done in 0..commit.steps.len() {
        let (scenario, disk, commit, _) = decided(Inside);
        let Step::Rename {
            from: Location::Store(from),
            to: Location::Base(to),
            directory: false,
            ..
        } = &commit.steps[done]
        else {
            continue;
        };
        commit.steps[..done].iter().for_each(|step| step.run(&disk, Direction::Forward).unwrap());
        let base = scenario.base();
        fs::hard_link(base.join(".branching").join(from), base.join(to)).unwrap();
        scenario.restart();
        assert_eq!(without_times(&scenario.snapshot()), wanted, "{}", to.display());
        moves += 1;
    }
    assert!(moves > 2, "{moves}");
}

#[test]
fn recovery_can_be_cut_at_every_step_too() {
    let (scenario, disk, commit, _) = decided(Inside);
    commit.apply(&disk).unwrap();
    let wanted = without_times(&scenario.snapshot());
    let steps = commit.steps.len();
    for first in [0, steps / 2, steps] {
        for second in 0..=steps {
            let (scenario, disk, commit, _) = decided(Inside);
            commit.steps[..first]
                .iter()
                .for_each(|step| step.run(&disk, Direction::Forward).unwrap());
            if second > first {
                commit.steps[first..second]
                    .iter()
                    .for_each(|step| step.run(&disk, Direction::Forward).unwrap());
            }
            scenario.restart();
            assert_eq!(
                without_times(&scenario.snapshot()),
                wanted,
                "cut at {first}, then at {second}"
            );
        }
    }
}

#[test]
fn a_commit_that_is_taken_back_leaves_the_base_as_it_was_from_every_step() {
    sweep_commit_that(Inside);
    sweep_commit_that(Elsewhere);
}

fn sweep_commit_that(place: Store) {
    let steps = decided(place).2.steps.len();
    for done in 0..=steps {
        for taken_back in [0, done / 2, done] {
            let (scenario, disk, commit, before) = decided(place);
            commit.steps[..done]
                .iter()
                .for_each(|step| step.run(&disk, Direction::Forward).unwrap());
            commit.mark_rollback(&disk).unwrap();
            let undone = &commit.steps[done - taken_back..done];
            undone.iter().rev().for_each(|step| step.run(&disk, Direction::Back).unwrap());
            scenario.restart();
            assert_eq!(scenario.snapshot(), before, "{done} steps done, {taken_back} taken back");
        }
    }
}

#[test]
fn a_partial_commit_that_is_cut_at_any_step_leaves_the_branch_with_the_rest_or_with_all() {
    for place in [Inside, Elsewhere] {
        let whole = Scenario::new(place);
        whole.work();
        let all = whole.shown();
        let (scenario, disk, commit, before) = decided_part(place, Part::Mixed);
        commit.apply(&disk).unwrap();
        scenario.restart();
        let wanted = without_times(&scenario.snapshot());
        assert_ne!(wanted, without_times(&before));
        let steps = commit.steps.len();
        // Of the file with two names one is in the base now.
        let mut rest = all.clone().unwrap();
        for name in ["first name", "second name"] {
            let text = rest.get_mut(Path::new(name)).unwrap();
            *text = text.replace(" 2 ", " 1 ");
        }
        for done in 0..=steps {
            for is_back in [false, true] {
                let when = format!("{place:?}, cut after {done} of {steps} steps, back: {is_back}");
                let (scenario, disk, commit, before) = decided_part(place, Part::Mixed);
                let run = &commit.steps[..done];
                run.iter().for_each(|step| step.run(&disk, Direction::Forward).unwrap());
                if is_back {
                    commit.mark_rollback(&disk).unwrap();
                }
                for turn in ["first", "second"] {
                    scenario.restart();
                    let (base, branch) = (scenario.snapshot(), scenario.shown());
                    if is_back {
                        assert_eq!(base, before, "{when}, {turn} start");
                        assert_eq!(branch, all, "{when}, {turn} start");
                    } else {
                        assert_eq!(without_times(&base), wanted, "{when}, {turn} start");
                        assert_eq!(branch.as_ref(), Some(&rest), "{when}, {turn} start");
                    }
                }
                let workspace = scenario.open();
                workspace
                    .commit(&BranchRef::Name("branch".to_owned()), &CommitOptions::default())
                    .unwrap_or_else(|error| panic!("{when}, then all of it: {error}"));
            }
        }
    }
}

/// As [`decided`], then committed to the end; returns the logged undo and the base after the commit.
fn undo_decided(
    place: Store,
) -> (Scenario, TransactionRoots, LoggedTransaction, BTreeMap<PathBuf, String>) {
    let (scenario, disk, commit, _) = decided(place);
    commit.apply(&disk).unwrap();
    drop(disk);
    scenario.restart();
    let after = scenario.snapshot();
    let workspace = scenario.open();
    let (disk, header, plan) = workspace.plan_revert_for_tests(UndoDirection::Undo).unwrap();
    assert!(plan.drift.is_empty(), "{:?}", plan.drift);
    let undo = Prepared::new(&disk, plan).unwrap().log(&disk, header).unwrap();
    (scenario, disk, undo, after)
}

#[test]
fn a_decided_undo_rolls_forward_from_every_step_and_recovery_can_be_cut_too() {
    sweep_decided_undo(Inside);
    sweep_decided_undo(Elsewhere);
}

fn sweep_decided_undo(place: Store) {
    let (scenario, _, _, before) = decided(place);
    drop(scenario);
    let steps = undo_decided(place).2.steps.len();
    assert_eq!(steps, 25, "all but the two marks that a layer's objects had");
    for done in 0..=steps {
        let (scenario, disk, undo, _) = undo_decided(place);
        undo.steps[..done].iter().for_each(|step| step.run(&disk, Direction::Forward).unwrap());
        scenario.restart();
        assert_eq!(
            without_times(&scenario.snapshot()),
            without_times(&before),
            "power cut after {done} of {steps} steps"
        );
        scenario.restart(); // a second time nothing is left to do
        let workspace = scenario.open();
        assert_eq!(workspace.history().unwrap().len(), 1);
        assert!(workspace.history().unwrap()[0].undone.is_some());
    }
}

#[test]
fn an_undo_that_is_taken_back_leaves_the_base_as_it_was_from_every_step() {
    let steps = undo_decided(Inside).2.steps.len();
    for done in 0..=steps {
        for taken_back in [0, done / 2, done] {
            let (scenario, disk, undo, after) = undo_decided(Inside);
            undo.steps[..done].iter().for_each(|step| step.run(&disk, Direction::Forward).unwrap());
            undo.mark_rollback(&disk).unwrap();
            let undone = &undo.steps[done - taken_back..done];
            undone.iter().rev().for_each(|step| step.run(&disk, Direction::Back).unwrap());
            scenario.restart();
            assert_eq!(scenario.snapshot(), after, "{done} steps done, {taken_back} taken back");
        }
    }
}

#[test]
fn a_plan_torn_or_stale_at_any_byte_is_no_plan_or_the_whole_one() {
    let (scenario, disk, commit, before) = decided(Inside);
    let directory = Path::new("journal").join(commit.header.transaction.to_string());
    let path = scenario.base().join(".branching").join(&directory).join("plan");
    let bytes = fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        // What a disk may leave of a write that it lost a part of: nothing, zeros, or older bytes.
        let zeros: Vec<u8> =
            bytes[..length].iter().copied().chain(bytes[length..].iter().map(|_| 0)).collect();
        for found in [&bytes[..length], &zeros] {
            fs::write(&path, found).unwrap();
            assert!(
                LoggedTransaction::read(&disk, &directory).unwrap().is_none(),
                "cut at {length}"
            );
        }
    }
    fs::write(&path, &bytes).unwrap();
    assert_eq!(
        LoggedTransaction::read(&disk, &directory).unwrap().unwrap().steps.len(),
        commit.steps.len()
    );
    assert_eq!(scenario.snapshot(), before);
}

#[test]
fn an_entry_that_lost_its_plan_and_holds_the_base_is_not_thrown_away() {
    let (scenario, disk, commit, _) = decided(Inside);
    commit.apply(&disk).unwrap();
    let entry =
        scenario.base().join(".branching/journal").join(commit.header.transaction.to_string());
    fs::write(entry.join("plan"), "torn").unwrap();
    let refused = Workspace::open(&scenario.base(), None, Settings::default());
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("has no valid plan, but holds"), "{error}");
    assert!(fs::read_dir(&entry).unwrap().count() > 1, "what it holds is still there");
}

#[test]
fn a_torn_plan_is_no_plan() {
    let (scenario, disk, commit, before) = decided(Inside);
    let path = scenario
        .base()
        .join(".branching/journal")
        .join(commit.header.transaction.to_string())
        .join("plan");
    let bytes = fs::read(&path).unwrap();
    for length in [0, 8, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        assert!(
            LoggedTransaction::read(
                &disk,
                Path::new("journal").join(commit.header.transaction.to_string()).as_path()
            )
            .unwrap()
            .is_none()
        );
    }
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    fs::write(&path, &damaged).unwrap();
    assert!(recover(&disk).unwrap().is_none(), "a plan with a wrong checksum is not carried out");
    assert_eq!(scenario.snapshot(), before);
}

#[test]
fn an_error_half_way_rolls_back_and_names_the_path() {
    let (scenario, disk, mut commit, before) = decided(Inside);
    let impossible = super::Location::Base(PathBuf::from("no/such/place"));
    let at = commit.steps.len() - 3;
    commit.steps.insert(
        at,
        Step::Rename { from: impossible.clone(), to: impossible, ino: 0, directory: false },
    );
    let error = commit.apply(&disk).unwrap_err();
    assert!(error.to_string().contains("no/such/place"), "{error}");
    assert_eq!(scenario.snapshot(), before);
}

#[test]
fn a_store_elsewhere_is_settled_wherever_it_was_cut_around_the_steps() {
    // Staged and not logged: nothing happened.
    let scenario = Scenario::new(Elsewhere);
    let before = scenario.snapshot();
    scenario.work();
    drop(scenario.plan(Part::All));
    assert_ne!(fs::read_dir(scenario.base().join(".branching/layers")).unwrap().count(), 0);
    scenario.restart();
    assert_eq!(scenario.snapshot(), before);
    assert_eq!(scenario.open().list().unwrap().len(), 1);
    // Carried out, and the record is gone already, with the layer or without it.
    for loses_layer in [false, true] {
        let (scenario, disk, commit, _) = decided(Elsewhere);
        commit.apply(&disk).unwrap();
        let after = scenario.snapshot();
        let store = scenario.elsewhere.as_ref().unwrap().path().join("store");
        fs::remove_dir_all(store.join("branches")).unwrap();
        fs::create_dir(store.join("branches")).unwrap();
        if loses_layer {
            fs::remove_dir_all(store.join("layers")).unwrap();
            fs::create_dir(store.join("layers")).unwrap();
        }
        scenario.restart();
        assert_eq!(scenario.snapshot(), after);
        assert_eq!(scenario.open().history().unwrap().len(), 1);
    }
}
