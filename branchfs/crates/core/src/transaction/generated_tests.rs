//! Power cuts in transactions that are generated at random: moves, swaps, cycles, directories that leave and come back,
//! replaced directories, groups of hard links, changes of type, attributes. Each is committed, undone and redone. After
//! every step of each transaction, recovery must find where it was cut, forward and back, also when recovery is cut itself.
//!
//! The same changes are made in a copy of the base, which says what the base must look like afterwards. A failure prints
//! its seed and the smallest list of changes that still fails.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use fastrand::Rng;

use super::journal::{LoggedTransaction, Prepared};
use super::progress::Progress;
use super::step::Direction;
use super::step_crash_tests::{find, make, parent, rename, unlink, write};
use super::{Step, TransactionRoots};
use crate::vfs::SetAttr;
use crate::view::{New, View};
use crate::workspace::{BranchRef, Settings, UndoDirection, Workspace};

/// A change of a directory tree, by relative paths.
#[derive(Clone, Debug)]
enum Change {
    Write(String, u32),
    MakeDirectory(String),
    Unlink(String),
    RemoveDirectory(String),
    Rename(String, String),
    Link(String, String),
    Symlink(String),
    SetMode(String, u32),
}

/// A random list of changes. Changes that are not possible are skipped.
type Action = Vec<Change>;

const NAMES: [&str; 4] = ["a", "b", "d", "e"];

fn path(random: &mut Rng) -> String {
    let depth = [1, 1, 1, 2, 2, 3][random.usize(..6)];
    let names: Vec<&str> = (0..depth).map(|_| NAMES[random.usize(..NAMES.len())]).collect();
    names.join("/")
}

/// One action: a production of the grammar.
fn action(random: &mut Rng) -> Action {
    use Change::{Link, MakeDirectory, Rename, SetMode, Symlink, Unlink, Write};
    let (one, two, three) = (path(random), path(random), path(random));
    let value = random.u32(..);
    let away = || "away".to_owned();
    let moved = |from: &String, to: &String| Rename(from.clone(), to.clone());
    match random.u32(..14) {
        0 | 1 => vec![Write(one, value)],
        2 => vec![MakeDirectory(one.clone()), Write(format!("{one}/new"), value)],
        3 => vec![Change::RemoveDirectory(one.clone()), Unlink(one)],
        4 => vec![moved(&one, &two)],
        5 => vec![moved(&one, &away()), moved(&two, &one), moved(&away(), &two)],
        6 => vec![
            moved(&one, &away()),
            moved(&two, &one),
            moved(&three, &two),
            moved(&away(), &three),
        ],
        7 => vec![moved(&one, &away()), moved(&away(), &one)],
        8 => vec![moved(&one, &format!("{two}/x")), moved(&format!("{two}/x"), &one)],
        // Replaced, while something in it is kept.
        9 => vec![
            moved(&one, &away()),
            MakeDirectory(one.clone()),
            moved(&format!("{}/a", away()), &format!("{one}/a")),
            moved(&format!("{}/d", away()), &format!("{one}/d")),
            Change::RemoveDirectory(away()),
            Unlink(away()),
        ],
        10 => vec![Link(one, two)],
        // One link over another: if they are the same file, nothing happens.
        11 => vec![Link(one.clone(), away()), moved(&away(), &one), Unlink(away())],
        12 => vec![
            Change::RemoveDirectory(one.clone()),
            Unlink(one.clone()),
            [Symlink(one.clone()), MakeDirectory(one.clone()), Write(one, value)]
                [random.usize(..3)]
            .clone(),
        ],
        _ => vec![SetMode(one, 0o700 + value % 8)],
    }
}

/// Where changes are made.
enum Target<'t> {
    Directory(&'t Path),
    View(&'t mut View),
}

impl Target<'_> {
    fn apply(&mut self, change: &Change) -> std::io::Result<()> {
        match self {
            Self::Directory(root) => apply_to_directory(root, change),
            Self::View(view) => {
                apply_to_view(view, change);
                Ok(())
            }
        }
    }
}

fn apply_to_directory(root: &Path, change: &Change) -> std::io::Result<()> {
    match change {
        Change::Write(path, value) => fs::write(root.join(path), value.to_string()),
        Change::MakeDirectory(path) => fs::create_dir(root.join(path)),
        Change::Unlink(path) => fs::remove_file(root.join(path)),
        Change::RemoveDirectory(path) => fs::remove_dir(root.join(path)),
        Change::Rename(from, to) => fs::rename(root.join(from), root.join(to)),
        Change::Link(from, to) => fs::hard_link(root.join(from), root.join(to)),
        Change::Symlink(path) => symlink("target", root.join(path)),
        Change::SetMode(path, mode) => {
            if fs::symlink_metadata(root.join(path))?.is_symlink() {
                return Err(std::io::ErrorKind::InvalidInput.into());
            }
            fs::set_permissions(root.join(path), fs::Permissions::from_mode(*mode))
        }
    }
}

fn apply_to_view(view: &mut View, change: &Change) {
    match change {
        Change::Write(path, value) => write(view, path, &value.to_string()),
        Change::MakeDirectory(path) => make(view, path, New::Directory { mode: 0o755 }),
        Change::Unlink(path) => unlink(view, path),
        Change::RemoveDirectory(path) => {
            let (parent, name) = parent(view, path);
            view.rmdir(parent, OsStr::new(&name)).unwrap();
        }
        Change::Rename(from, to) => rename(view, from, to),
        Change::Link(from, to) => {
            let (linked, (parent, name)) = (find(view, from), parent(view, to));
            view.link(linked, parent, OsStr::new(&name)).unwrap();
        }
        Change::Symlink(path) => make(view, path, New::Symlink { target: OsStr::new("target") }),
        Change::SetMode(path, mode) => {
            let index = find(view, path);
            view.setattr(index, &SetAttr { mode: Some(*mode), ..SetAttr::default() }).unwrap();
        }
    }
}

/// Carries out an action in a directory and returns its changes. A directory is emptied before it is removed.
fn perform(root: &Path, action: &Action) -> Vec<Change> {
    let mut made = Vec::new();
    for change in action {
        if let Change::RemoveDirectory(path) = change {
            if fs::symlink_metadata(root.join(path)).is_ok_and(|found| found.is_dir()) {
                remove_all(root, path, &mut made);
            }
        } else if !is_out_of_grammar(root, change) && apply_to_directory(root, change).is_ok() {
            made.push(change.clone());
        }
    }
    made
}

/// A write through a symbolic link leaves the tree.
fn is_out_of_grammar(root: &Path, change: &Change) -> bool {
    let Change::Write(path, _) = change else { return false };
    fs::symlink_metadata(root.join(path)).is_ok_and(|found| !found.is_file())
}

fn remove_all(root: &Path, path: &str, made: &mut Vec<Change>) {
    let mut names: Vec<_> =
        fs::read_dir(root.join(path)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    for name in names {
        let path = format!("{path}/{}", name.to_str().unwrap());
        if fs::symlink_metadata(root.join(&path)).unwrap().is_dir() {
            remove_all(root, &path, made);
        } else {
            fs::remove_file(root.join(&path)).unwrap();
            made.push(Change::Unlink(path));
        }
    }
    fs::remove_dir(root.join(path)).unwrap();
    made.push(Change::RemoveDirectory(path.to_owned()));
}

/// Path -> type, mode, content, and the first name of the same object. `with_times`: modification times too.
type Snapshot = BTreeMap<PathBuf, String>;

fn snapshot(root: &Path, with_times: bool) -> Snapshot {
    let (mut tree, mut names) = (Snapshot::new(), HashMap::new());
    let mut pending = vec![PathBuf::new()];
    while let Some(path) = pending.pop() {
        let (full, metadata) = (root.join(&path), fs::symlink_metadata(root.join(&path)).unwrap());
        let mut text = format!("{:o}", metadata.mode());
        let kind = metadata.file_type();
        assert!(!kind.is_char_device(), "a whiteout came into the base at {}", path.display());
        if kind.is_dir() {
            let entries = fs::read_dir(&full).unwrap().map(|entry| entry.unwrap().file_name());
            let shown = entries.filter(|name| name != ".branching");
            pending.extend(shown.map(|name| path.join(name)));
        } else if kind.is_symlink() {
            text += &format!(" -> {}", fs::read_link(&full).unwrap().display());
        } else {
            text += &format!(" {}", fs::read_to_string(&full).unwrap());
        }
        if with_times {
            write!(text, " {}.{}", metadata.mtime(), metadata.mtime_nsec()).unwrap();
        }
        names.entry(metadata.ino()).or_insert_with(Vec::new).push(path.clone());
        tree.insert(path, text);
    }
    for mut group in names.into_values().filter(|group: &Vec<PathBuf>| group.len() > 1) {
        group.sort();
        for path in &group {
            *tree.get_mut(path).unwrap() += &format!(" = {}", group[0].display());
        }
    }
    tree
}

/// Who writes the layer, and where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Fuse,
    FuseStoreElsewhere,
    Kernel,
}

/// A workspace over a base that is made of actions, and a copy of the base.
struct Case {
    directory: tempfile::TempDir,
    elsewhere: Option<tempfile::TempDir>,
    random: Rng,
    /// Steps of all transactions.
    steps: usize,
}

impl Case {
    fn new(form: Form, seed: u64, before: &[Action]) -> Self {
        let elsewhere = (form == Form::FuseStoreElsewhere).then(|| tempfile::tempdir().unwrap());
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let case = Self { directory, elsewhere, random: Rng::with_seed(seed), steps: 0 };
        for root in [case.base(), case.copy()] {
            for path in ["", "d", "d/d", "e", "e/a"] {
                fs::create_dir(root.join(path)).unwrap();
            }
            for path in ["a", "b", "d/a", "d/d/b", "e/a/e"] {
                fs::write(root.join(path), format!("old {path}")).unwrap();
            }
            for action in before {
                perform(&root, action);
            }
        }
        case
    }

    fn base(&self) -> PathBuf {
        self.directory.path().join("base")
    }

    fn copy(&self) -> PathBuf {
        self.directory.path().join("copy")
    }

    fn open(&self) -> Workspace {
        let store = self.elsewhere.as_ref().map(|place| place.path().join("store"));
        Workspace::open_again(&self.base(), store.as_deref(), Settings::default())
    }

    /// Makes the changes in a branch, and in the copy.
    fn change(&self, form: Form, actions: &[Action]) {
        let workspace = self.open();
        let id = workspace.create("branch", &BranchRef::Id(0)).unwrap().id;
        let mounted = workspace.mount().mounted(1).unwrap();
        let make = |target: &mut Target<'_>| {
            for action in actions {
                for change in perform(&self.copy(), action) {
                    target.apply(&change).unwrap_or_else(|error| panic!("{change:?}: {error}"));
                }
            }
        };
        if form == Form::Kernel {
            mounted.lock().tree.make_layer().unwrap();
            let layer = workspace.store().join("layers").join(id.to_string());
            crate::overlayfs_upper::write_for_tests(&self.base(), &layer, |branch| {
                make(&mut Target::Directory(branch));
            });
        } else {
            make(&mut Target::View(&mut mounted.lock()));
        }
    }

    fn decide_commit(&self) -> (TransactionRoots, LoggedTransaction) {
        let (disk, header, plan) = self
            .open()
            .plan_for_tests("branch", crate::path_filter::PathFilter::default())
            .unwrap();
        assert!(plan.drift.is_empty(), "{:?}", plan.drift);
        for whiteout in &plan.stray_whiteouts {
            disk.remove_file(whiteout).unwrap();
        }
        let decided = Prepared::new(&disk, plan).unwrap().log(&disk, header).unwrap();
        (disk, decided)
    }

    fn decide_revert(&self, towards: UndoDirection) -> (TransactionRoots, LoggedTransaction) {
        let (disk, header, plan) = self.open().plan_revert_for_tests(towards).unwrap();
        assert!(plan.drift.is_empty(), "{:?}", plan.drift);
        let decided = Prepared::new(&disk, plan).unwrap().log(&disk, header).unwrap();
        (disk, decided)
    }

    /// Cuts the transaction after every step, in both directions. Recovery is cut too: in a small plan after each of its
    /// steps, else after a random one; and the recovery of that recovery after a random one. Nothing is done afterwards.
    fn sweep(
        &mut self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
        new: Option<&Snapshot>,
    ) -> Snapshot {
        let steps = &decided.steps;
        self.steps += steps.len();
        let old = snapshot(&self.base(), true);
        let run = |range: &[Step]| {
            range.iter().for_each(|step| step.run(disk, Direction::Forward).unwrap());
        };
        let back = |range: &[Step]| {
            range.iter().rev().for_each(|step| step.run(disk, Direction::Back).unwrap());
        };
        // Rolling back ends with all attributes, in the order of the plan.
        let attributes: Vec<&Step> =
            steps.iter().filter(|step| matches!(step, Step::Metadata { .. })).collect();
        let back_to = |from: usize, cut: usize| {
            back(&steps[from.saturating_sub(cut)..from]);
            let left = cut.saturating_sub(from).min(attributes.len());
            let restored = &attributes[..left];
            restored.iter().for_each(|step| step.run(disk, Direction::Back).unwrap());
        };
        // Undisturbed, nothing looks like an edit of others.
        decided.apply(disk).unwrap();
        back(steps);
        let mut wanted = None;
        for cut in 0..=steps.len() {
            let when = format!("cut after {cut} of {} steps: {steps:#?}", steps.len());
            let progress =
                || decided.progress(disk).unwrap_or_else(|error| panic!("{error}; {when}"));
            run(&steps[..cut]);
            let Progress { forward, back: last } = progress();
            back(&steps[..cut]);
            for again in self.recovery_cuts(steps.len(), steps.len() - forward) {
                run(&steps[..cut]);
                run(&steps[forward..forward + again]);
                let second = progress().forward;
                let third = self.random.usize(second..=steps.len());
                run(&steps[second..third]);
                run(&steps[progress().forward..]);
                let found = snapshot(&self.base(), true);
                let wanted = wanted.get_or_insert_with(|| found.clone());
                assert_eq!(wanted, &found, "recovery cut after {again}, {when}");
                back(steps);
            }
            for again in self.recovery_cuts(steps.len(), last + attributes.len()) {
                run(&steps[..cut]);
                back_to(last, again);
                let second = progress().back;
                back_to(second, self.random.usize(..=second + attributes.len()));
                decided.rollback(disk, progress().back).unwrap();
                let found = snapshot(&self.base(), true);
                assert_eq!(found, old, "rolled back, recovery cut after {again}, {when}");
                disk.remove_file(&super::Location::Store(decided.directory.join("rollback")))
                    .unwrap();
            }
        }
        if let Some(new) = new {
            run(steps);
            assert_eq!(&snapshot(&self.base(), false), new, "{steps:#?}");
            back(steps);
        }
        old
    }

    /// Where recovery with this many steps is cut.
    fn recovery_cuts(&mut self, plan: usize, steps: usize) -> Vec<usize> {
        const SMALL_PLAN_STEPS: usize = 8;
        if plan <= SMALL_PLAN_STEPS {
            (0..=steps).collect()
        } else {
            vec![self.random.usize(..=steps)]
        }
    }

    /// Cuts the transaction somewhere and starts again.
    fn cut_and_restart(
        &mut self,
        disk: &TransactionRoots,
        decided: &LoggedTransaction,
        is_back: bool,
    ) {
        let cut = self.random.usize(..=decided.steps.len());
        decided.steps[..cut].iter().for_each(|step| step.run(disk, Direction::Forward).unwrap());
        if is_back {
            decided.mark_rollback(disk).unwrap();
            let kept = self.random.usize(..=cut);
            let undone = &decided.steps[kept..cut];
            undone.iter().rev().for_each(|step| step.run(disk, Direction::Back).unwrap());
        }
        drop(self.open());
        let journal = fs::read_dir(self.base().join(".branching/journal")).unwrap();
        assert_eq!(journal.count(), 0, "nothing is left to recover");
    }

    fn check(&mut self, form: Form, actions: &[Action]) {
        self.change(form, actions);
        let new = snapshot(&self.copy(), false);
        let (disk, commit) = self.decide_commit();
        let old = self.sweep(&disk, &commit, Some(&new));
        // Rolled back, the branch is as it was, and its commit does the same.
        self.cut_and_restart(&disk, &commit, true);
        assert_eq!(snapshot(&self.base(), true), old);
        let (disk, commit) = self.decide_commit();
        self.cut_and_restart(&disk, &commit, false);
        assert_eq!(snapshot(&self.base(), false), new);
        let (disk, undo) = self.decide_revert(UndoDirection::Undo);
        self.sweep(&disk, &undo, None);
        self.cut_and_restart(&disk, &undo, false);
        let found = snapshot(&self.base(), false);
        let strip = |tree: &Snapshot| tree.keys().cloned().collect::<Vec<_>>();
        assert_eq!(strip(&found), strip(&old));
        let (disk, redo) = self.decide_revert(UndoDirection::Redo);
        self.sweep(&disk, &redo, Some(&new));
        self.cut_and_restart(&disk, &redo, true);
        assert_eq!(snapshot(&self.base(), false), found);
        let (disk, redo) = self.decide_revert(UndoDirection::Redo);
        self.cut_and_restart(&disk, &redo, false);
        assert_eq!(snapshot(&self.base(), false), new);
    }
}

/// The first error of a case, and how many steps it had.
fn outcome(form: Form, seed: u64, before: &[Action], actions: &[Action]) -> Result<usize, String> {
    let check = || {
        let mut case = Case::new(form, seed, before);
        case.check(form, actions);
        case.steps
    };
    catch_unwind(AssertUnwindSafe(check)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap_or(&"").to_string())
    })
}

/// Leaves out actions as long as the case still fails.
fn shrink(form: Form, seed: u64, mut before: Vec<Action>, mut actions: Vec<Action>) -> String {
    let mut error = String::new();
    for list in [true, false] {
        let mut at = 0;
        while at < if list { before.len() } else { actions.len() } {
            let (mut fewer_before, mut fewer) = (before.clone(), actions.clone());
            drop(if list { fewer_before.remove(at) } else { fewer.remove(at) });
            match outcome(form, seed, &fewer_before, &fewer) {
                Err(found) => (before, actions, error) = (fewer_before, fewer, found),
                Ok(_) => at += 1,
            }
        }
    }
    format!("base: {before:?}\nbranch: {actions:?}\n{error}")
}

fn generate(random: &mut Rng, count_max: usize) -> Vec<Action> {
    (0..random.usize(1..=count_max)).map(|_| action(random)).collect()
}

/// Few seeds in every run, many with `BRANCHFS_SOAK`; `BRANCHFS_SEED` repeats one.
fn sweep_generated(form: Form) {
    let seeds = match std::env::var("BRANCHFS_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => {
            let usual = if form == Form::FuseStoreElsewhere { 15 } else { 60 }; // it syncs a real disk
            let is_soak = std::env::var_os("BRANCHFS_SOAK").is_some();
            let count = if is_soak { 3000 } else { usual };
            (0..count).collect::<Vec<u64>>()
        }
    };
    let mut steps = 0;
    for seed in seeds {
        let mut random = Rng::with_seed(seed);
        let (before, actions) = (generate(&mut random, 8), generate(&mut random, 14));
        match outcome(form, seed, &before, &actions) {
            Ok(count) => steps += count,
            Err(error) => {
                let shrunk = shrink(form, seed, before, actions);
                panic!("{form:?}, BRANCHFS_SEED={seed}: {error}\nshrunk to\n{shrunk}");
            }
        }
    }
    println!("{steps} steps");
}

#[test]
fn generated_transactions_of_the_fuse_view_are_all_or_nothing_wherever_they_are_cut() {
    sweep_generated(Form::Fuse);
}

#[test]
fn generated_transactions_with_a_store_elsewhere_are_all_or_nothing_wherever_they_are_cut() {
    sweep_generated(Form::FuseStoreElsewhere);
}

#[test]
fn generated_transactions_of_the_overlay_driver_are_all_or_nothing_wherever_they_are_cut() {
    sweep_generated(Form::Kernel);
}

fn moved(from: &str, to: &str) -> Change {
    Change::Rename(from.to_owned(), to.to_owned())
}

/// Cases that were wrong once, each with other changes before and after it in the plan.
#[test]
fn directories_that_come_back_and_links_over_themselves_are_all_or_nothing_wherever_they_are_cut() {
    let written = |path: &str| Change::Write(path.to_owned(), 1);
    let around = |actions: Vec<Change>| vec![vec![written("aa"), written("d/a")], actions];
    let linked = vec![vec![Change::Link("a".to_owned(), "link".to_owned())]];
    let cases = [
        (vec![], around(vec![moved("e", "t"), moved("t", "e")])),
        (vec![], around(vec![moved("e", "d/e"), moved("d/e", "e")])),
        (
            vec![],
            around(vec![
                moved("d", "t"),
                Change::MakeDirectory("d".to_owned()),
                moved("t/d", "d/d"),
                Change::RemoveDirectory("t".to_owned()),
            ]),
        ),
        (linked, around(vec![Change::Unlink("a".to_owned()), moved("link", "a")])),
    ];
    for form in [Form::Fuse, Form::FuseStoreElsewhere, Form::Kernel] {
        for (before, actions) in &cases {
            outcome(form, 0, before, actions)
                .unwrap_or_else(|error| panic!("{form:?} {actions:?}: {error}"));
        }
    }
}
