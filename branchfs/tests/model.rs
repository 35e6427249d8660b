//! Random work in a branch and the same work in an ordinary directory: both must show the same, step by step, and the
//! base must be that directory after the commit. The reference is the native file system itself.
//!
//! Steps are drawn by proptest, the same in every run. It removes steps from a case that fails as long as the case still
//! fails, and prints what is left.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Instant;

use common::disk::Disk;
use common::mapping::{Mapping, PAGE_BYTES, Sharing};
use common::work::{Operation, Random, apply, operation};
use common::{Content, Mount, Object, assert_same, shell, snapshot, snapshot_by_names, succeed};
use proptest::collection::vec;
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rustix::fs::{CWD, Timespec, Timestamps};

/// Both trees get the same times everywhere: when each step happened is not compared, that times are carried is.
fn settle_times(root: &Path) {
    let fixed = |nanoseconds: i64| Timestamps {
        last_access: Timespec { tv_sec: 1_000_000_000, tv_nsec: 0 },
        last_modification: Timespec { tv_sec: 1_000_000_000, tv_nsec: nanoseconds },
    };
    // Deepest first: setting a child's times does not touch its parent, but copying it up might.
    for (number, path) in snapshot(root).keys().rev().enumerate() {
        let number = i64::try_from(number).unwrap();
        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(CWD, root.join(path), &fixed(number + 1), flags).unwrap();
    }
}

fn fill(root: &Path) {
    shell(
        root,
        "mkdir -p a/b/e b 'c d'/a e; echo one > a/a; echo two > a/b/a; echo three > b/a; ln -s a b/e
         ln a/a a/e; ln b/a e/x; head -c 20000 /dev/urandom > 'c d'/b; mkfifo b/b; chmod 700 e; touch -d '2001-01-01 00:00:00.123456789' a/b/a",
    );
}

/// A tree as the driver shows it: overlayfs counts the link too that the history keeps of a name deleted earlier.
fn seen(root: &Path) -> BTreeMap<PathBuf, Object> {
    if common::driver() == "overlay" { snapshot_by_names(root) } else { snapshot(root) }
}

/// Tests as many cases of a strategy as are asked for.
fn check<S: Strategy>(cases: usize, strategy: S, test: impl Fn(S::Value)) {
    const SHRINKS_MAX: u32 = 300;
    const SHRINKING_MAX_MILLISECONDS: u32 = 600_000;
    let config = Config {
        cases: cases.try_into().unwrap(),
        max_shrink_iters: SHRINKS_MAX,
        max_shrink_time: SHRINKING_MAX_MILLISECONDS,
        failure_persistence: None,
        ..Config::default()
    };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let deadline = common::soak_deadline();
    let (count, is_failing) = (Cell::new(0), Cell::new(false));
    let left_out = Cell::new(common::soak_skip());
    let outcome = runner.run(&strategy, |case| {
        if left_out.get() > 0 {
            left_out.set(left_out.get() - 1);
            return Ok(());
        }
        if !is_failing.get() && deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(());
        }
        is_failing.set(true); // until it has passed
        test(case);
        is_failing.set(false);
        count.set(count.get() + 1);
        if count.get() % 10 == 0 {
            println!("{} cases of {cases} have passed", count.get());
        }
        Ok(())
    });
    println!("{} cases of {cases}", count.get());
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

/// What one step draws from; another seed makes no case smaller.
fn seed() -> impl Strategy<Value = u64> {
    (1..=u64::MAX).no_shrink()
}

fn operation_of(seed: u64) -> Operation {
    operation(&mut Random(seed))
}

/// Runs random operations in branches that are committed one after the other; operations are drawn from their seeds.
fn run(rounds: &[Vec<u64>]) {
    let reference = tempfile::tempdir().unwrap();
    let mirror = reference.path().join("mirror");
    let mount = Mount::over(fill);
    shell(
        reference.path(),
        // Not the store: the daemon goes on working in it.
        &format!(
            "mkdir mirror; find '{0}' -mindepth 1 -maxdepth 1 ! -name .branching -exec cp -a -t mirror {{}} +
             chown --reference='{0}' mirror; chmod --reference='{0}' mirror; touch -r '{0}' mirror",
            mount.base().display()
        ),
    );
    for (round, steps) in rounds.iter().enumerate() {
        let branch = mount.create(&format!("round-{round}"));
        for operation in steps.iter().copied().map(operation_of) {
            let (found, wanted) = (apply(&branch, &operation), apply(&mirror, &operation));
            assert_eq!(found, wanted, "round {round}: {operation:?}");
        }
        settle_times(&branch);
        settle_times(&mirror);
        let wanted = seen(&mirror);
        assert_same(&seen(&branch), &wanted, &format!("round {round}, in the branch"));
        mount.unmount();
        mount.mount();
        assert_same(&seen(&branch), &wanted, &format!("round {round}, after a remount"));
        mount.commit(&format!("round-{round}"));
        assert_same(
            &snapshot_by_names(&mount.base()),
            &snapshot_by_names(&mirror),
            &format!("round {round}, after the commit"),
        );
    }
    mount.unmount();
    for kept in ["branches", "layers", "journal", "trash"] {
        let kept = mount.base().join(".branching").join(kept);
        assert_eq!(fs::read_dir(&kept).unwrap().count(), 0, "{}", kept.display());
    }
}

#[test]
fn random_work_in_a_branch_is_what_an_ordinary_directory_would_show() {
    let cases = if common::driver() == "overlay" { 20 } else { 40 };
    check(cases, vec(vec(seed(), 0..=300), 2), |rounds| run(&rounds));
}

/// A tree as a family of branches is compared by: hard links below a branch and times, which others' work moves, are
/// compared elsewhere.
fn outline(root: &Path) -> BTreeMap<PathBuf, Object> {
    let mut tree = snapshot(root);
    tree.values_mut().for_each(|object| (object.mtime, object.nlink) = ((0, 0), 0));
    tree
}

/// A branch of the model: a copy of its parent from the fork on.
#[derive(Clone)]
struct Member {
    name: String,
    /// Position among the members; `None` is main.
    parent: Option<usize>,
    tree: PathBuf,
    /// What the parent was at the fork.
    origin: BTreeMap<PathBuf, Object>,
    /// How many commits there were before the fork.
    forked: usize,
}

/// What is in a branch after it was put on top of what its parent is now: nothing of either is lost.
fn merged(
    ours: &BTreeMap<PathBuf, Object>,
    origin: &BTreeMap<PathBuf, Object>,
    theirs: BTreeMap<PathBuf, Object>,
) -> BTreeMap<PathBuf, Object> {
    for (path, object) in ours.iter().filter(|(_, object)| object.content != Content::Directory) {
        let (ours, origin, theirs) = (Some(object), origin.get(path), theirs.get(path));
        let is_lost = ours != origin && theirs != origin && theirs != ours;
        assert!(!is_lost, "{}: both have changed it: {ours:?}, {theirs:?}", path.display());
    }
    let mut wanted = theirs;
    for path in ours.keys().chain(origin.keys()) {
        match (ours.get(path), origin.get(path)) {
            (one, other) if one == other => {}
            (Some(one), _) => drop(wanted.insert(path.clone(), one.clone())),
            (None, _) => drop(wanted.remove(path)),
        }
    }
    wanted
}

/// A file that is open for reading.
struct Held {
    branch: String,
    what: String,
    file: File,
}

/// A file that is mapped into memory; its descriptor is closed.
struct Mapped {
    branch: String,
    what: String,
    sharing: Sharing,
    mapping: Mapping,
}

/// A file that is mapped writable, and the same file of the mirror: the branch cannot be committed or forked until it is
/// released.
struct Writer {
    /// Position among the members.
    member: usize,
    mapping: Mapping,
    mirror: File,
    length: usize,
}

/// One step of a family.
#[derive(Clone, Debug)]
struct Event {
    kind: usize,
    /// Where the kind leaves something open.
    seed: u64,
    /// Seeds of operations, for work.
    operations: Vec<u64>,
}

fn events(count: usize) -> impl Strategy<Value = Vec<Event>> {
    let event = ((0..EVENT_KINDS).no_shrink(), seed(), vec(seed(), 0..=16));
    vec(event.prop_map(|(kind, seed, operations)| Event { kind, seed, operations }), 0..=count)
}

const EVENT_KINDS: usize = 18;

/// What a byte of a private mapping is that was written there; no operation writes it at the beginning of a file.
const PRIVATE: [u8; 8] = *b"private!";

/// Whether a part of what a mapping shows is that of a content, with zeros behind its end.
fn is_shown(content: &[u8], found: &[u8], part: std::ops::Range<usize>) -> bool {
    let has = content.get(part.start..part.end.min(content.len())).unwrap_or_default();
    let (same, behind) = found[part].split_at(has.len());
    same == has && behind.iter().all(|byte| *byte == 0)
}

/// Whether a verb was refused for deleted files that are open.
fn is_for_deleted(refusal: &str) -> bool {
    common::driver() == "overlay" && refusal.contains("deleted") && refusal.contains("still open")
}

fn is_deleted(file: &File) -> bool {
    let shown = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    shown.as_os_str().as_bytes().ends_with(b" (deleted)")
}

/// Branches of branches that work, commit, go, and come back after a crash; every one is compared with an ordinary
/// directory after each event, and so is main.
struct Family {
    random: Random,
    policy: &'static str,
    mount: Disk,
    /// Readers that stay open while files are copied up, committed and removed.
    held: Vec<Held>,
    mapped: Vec<Mapped>,
    writers: Vec<Writer>,
    /// Every content that a file ever had: a reader must find one of these as a whole.
    versions: HashSet<Vec<u8>>,
    is_full: bool,
    /// The base is on a file system of its own, and can be filled.
    is_small_disk: bool,
    mirrors: tempfile::TempDir,
    members: Vec<Option<Member>>,
    /// Members that a sibling's commit made stale, with their positions.
    stale: Vec<(usize, Member)>,
    /// How many commits there were.
    commits: usize,
    /// Copies of main: before each commit that can be undone, and after each that was.
    past: Vec<PathBuf>,
    future: Vec<PathBuf>,
    copies: usize,
}

impl Family {
    /// On the file system of `disk`: either a small one of its own, or the file `a/a` has another name outside of it.
    fn new(policy: &'static str, disk: Disk, is_small_disk: bool) -> Self {
        let plain = |root: &Path| {
            shell(
                root,
                "mkdir -p a/b/e b 'c d'/a e; echo one >a/a; echo two >a/b/a; echo x >b/a; ln -s a b/e; chmod 700 e",
            )
        };
        plain(&disk.base());
        if !is_small_disk {
            shell(disk.directory.path(), "ln base/a/a outside");
        }
        // Files of 8 KiB are big here: what the operations write is on both sides of that.
        let mount = disk.with_big_files_from(8 << 10);
        mount.mount_with(&["--policy", policy]);
        let mut family = Self {
            random: Random(1),
            policy,
            mount,
            held: Vec::new(),
            mapped: Vec::new(),
            writers: Vec::new(),
            versions: HashSet::new(),
            is_full: false,
            is_small_disk,
            mirrors: tempfile::tempdir().unwrap(),
            members: Vec::new(),
            stale: Vec::new(),
            commits: 0,
            past: Vec::new(),
            future: Vec::new(),
            copies: 0,
        };
        let base = family.mount.base();
        let copy = family.copy(&base);
        fs::rename(copy, family.main()).unwrap();
        family.note_versions(&family.main());
        family
    }

    fn note_versions(&mut self, tree: &Path) {
        let contents = snapshot(tree).into_values().filter_map(|object| match object.content {
            Content::File(content) => Some(content),
            _ => None,
        });
        self.versions.extend(contents);
    }

    /// Opens some file, and keeps it open, or maps it.
    fn hold(&mut self) {
        const HELD_MAX: usize = 12;
        let alive = self.alive();
        let Some(at) = self.pick(&alive) else { return };
        let Some((path, length)) = self.some_file(at) else { return };
        let name = self.member(at).name.clone();
        let (what, opened) =
            (format!("{name}: {}", path.display()), self.mount.branch(&name).join(&path));
        let file = File::open(&opened).unwrap();
        let sharing = match self.random.below(4) {
            0 => Sharing::ReadOnly,
            1 => Sharing::Private,
            _ if self.held.len() < HELD_MAX => {
                return self.held.push(Held { branch: name, what, file });
            }
            _ => return,
        };
        if length == 0 || self.mapped.len() >= HELD_MAX {
            return;
        }
        let mapping = Mapping::new(&file, length, sharing);
        if sharing == Sharing::Private {
            mapping.write(0, &PRIVATE[..length.min(PRIVATE.len())]).unwrap();
        }
        self.mapped.push(Mapped { branch: name, what, sharing, mapping });
    }

    /// A file of a branch, and its length.
    fn some_file(&mut self, at: usize) -> Option<(PathBuf, usize)> {
        let tree = snapshot(&self.member(at).tree);
        let files: Vec<(PathBuf, usize)> = tree
            .into_iter()
            .filter_map(|(path, object)| match object.content {
                Content::File(content) => Some((path, content.len())),
                _ => None,
            })
            .collect();
        if files.is_empty() { None } else { Some(files[self.random.below(files.len())].clone()) }
    }

    /// Maps some file writable, and writes through what is mapped.
    fn write_mapped(&mut self) {
        const WRITERS_MAX: usize = 3;
        self.drop_writers();
        let leaves = self.leaves();
        if let Some(at) = self.pick(&leaves).filter(|_| self.writers.len() < WRITERS_MAX) {
            if let Some((path, length)) = self.some_file(at).filter(|(_, length)| *length > 0) {
                let open = |path: PathBuf| File::options().read(true).write(true).open(path);
                let branch = self.mount.branch(&self.member(at).name);
                let file = open(branch.join(&path)).unwrap();
                let mapping = Mapping::new(&file, length, Sharing::Writable);
                let mirror = open(self.member(at).tree.join(&path)).unwrap();
                self.writers.push(Writer { member: at, mapping, mirror, length });
            }
        }
        for number in 0..self.writers.len() {
            let (at, byte) = (self.random.below(self.writers[number].length), b'm');
            let writer = &self.writers[number];
            let size = writer.mirror.metadata().unwrap().len();
            if at as u64 >= size {
                continue; // it was truncated
            }
            writer.mapping.write(at, &[byte]).unwrap();
            writer.mirror.write_all_at(&[byte], at as u64).unwrap();
            let tree = self.member(writer.member).tree.clone();
            let mut content = vec![0; usize::try_from(size).unwrap()];
            self.writers[number].mirror.read_exact_at(&mut content, 0).unwrap();
            self.versions.insert(content);
            self.note_versions(&tree);
        }
    }

    /// Releases what is mapped writable in a branch. Before, now and then, a commit is tried: a file that still has a name
    /// refuses it.
    fn release_writers(&mut self, at: usize) {
        let has_name = |writer: &Writer| writer.mirror.metadata().unwrap().nlink() > 0;
        let mut writers = self.writers.iter().filter(|writer| writer.member == at);
        if writers.any(has_name) && self.random.below(4) == 0 {
            let name = self.member(at).name.clone();
            let refused = common::refusal(&self.mount.run(&["commit", &name], &[]));
            let is_expected = refused.contains("open for writing") || is_for_deleted(&refused);
            assert!(is_expected, "{refused}");
        }
        self.writers.retain(|writer| writer.member != at);
    }

    /// Runs a verb that stops all writing in a branch. The kernel's overlayfs refuses that while a deleted file is open in it
    /// or mapped: such a file is released then.
    fn run_in(&mut self, branch: &str, words: &[&str]) -> Output {
        let refused = self.mount.run(words, &[]);
        if !is_for_deleted(&String::from_utf8_lossy(&refused.stderr)) {
            return refused;
        }
        let count = |family: &Self| family.held.len() + family.mapped.len();
        let before = count(self);
        self.held.retain(|held| held.branch != branch || !is_deleted(&held.file));
        self.mapped.retain(|mapped| mapped.branch != branch || !mapped.mapping.is_deleted());
        assert!(count(self) < before, "{}", String::from_utf8_lossy(&refused.stderr));
        self.mount.run(words, &[])
    }

    /// Lets go of what is mapped writable in branches that are gone.
    fn drop_writers(&mut self) {
        let members = &self.members;
        self.writers.retain(|writer| members[writer.member].is_some());
    }

    /// Reads all that is mapped: a file that is shared is one that there was, as a whole; pages of a private mapping are
    /// copied one by one, so each is a page that there was, or was written there.
    fn read_mapped(&mut self, when: &str) {
        let versions = &self.versions;
        self.mapped.retain(|Mapped { what, sharing, mapping, .. }| {
            let found = mapping.read();
            if found.is_empty() {
                return false; // of a branch that is gone, or of a file that was truncated to nothing
            }
            let is_known = match sharing {
                Sharing::Private => (0..found.len()).step_by(PAGE_BYTES).all(|from| {
                    let page = from..found.len().min(from + PAGE_BYTES);
                    let is_private = from == 0 && {
                        let length = page.len().min(PRIVATE.len());
                        found[..length] == PRIVATE[..length]
                    };
                    // A page that was written there goes when the file is truncated.
                    is_private || versions.iter().any(|one| is_shown(one, &found, page.clone()))
                }),
                _ => versions.iter().any(|version| is_shown(version, &found, 0..found.len())),
            };
            assert!(is_known, "{when}: {what}, {sharing:?}: bytes that no file ever had");
            true
        });
    }

    /// Reads through everything that is held: the kernel's pages of it are filled.
    fn read_held(&mut self, when: &str) {
        let versions = &self.versions;
        self.held.retain(|Held { what, file, .. }| {
            let mut found = vec![0; 1 << 17];
            let mut length = 0;
            loop {
                match file.read_at(&mut found[length..], length as u64) {
                    Ok(0) => break,
                    Ok(read) => length += read,
                    Err(error) if error.raw_os_error() == Some(libc::ESTALE) => return false,
                    Err(error) => panic!("{when}: {what}: {error}"),
                }
            }
            let is_known = versions.contains(&found[..length]);
            assert!(is_known, "{when}: {what}: {length} bytes that no file ever had");
            true
        });
    }

    /// A commit, and a large write, while the disk is full.
    fn fill_disk(&mut self) {
        let room = [0, 3000, 40_000][self.random.below(3)];
        let filler = self.mount.fill(room);
        self.is_full = true;
        if self.random.below(2) == 0 {
            self.commit();
        } else {
            self.write_much();
        }
        self.is_full = false;
        fs::remove_file(filler).unwrap();
    }

    /// Writes until there is no room; what was written is written in the mirror, too.
    fn write_much(&mut self) {
        let leaves = self.leaves();
        let Some(at) = self.pick(&leaves) else { return };
        let (name, tree) = (self.member(at).name.clone(), self.member(at).tree.clone());
        let files = snapshot(&tree);
        let is_file = |object: &Object| matches!(object.content, Content::File(_));
        let files: Vec<&PathBuf> =
            files.iter().filter(|(_, object)| is_file(object)).map(|(path, _)| path).collect();
        if files.is_empty() {
            return;
        }
        let path = files[self.random.below(files.len())];
        let (start, byte) =
            (self.random.below(9000), u8::try_from(self.random.below(256)).unwrap());
        let opened = File::options().write(true).open(self.mount.branch(&name).join(path));
        let Ok(file) = opened else { return };
        let data = vec![byte; 60_000];
        let mut done = 0;
        while done < data.len() {
            match file.write_at(&data[done..], (start + done) as u64) {
                Ok(written) => done += written,
                Err(_) => break,
            }
        }
        if done > 0 {
            let mirror = File::options().write(true).open(tree.join(path)).unwrap();
            mirror.write_all_at(&data[..done], start as u64).unwrap();
        }
        self.note_versions(&tree);
    }

    fn main(&self) -> PathBuf {
        self.mirrors.path().join("main")
    }

    fn copy(&mut self, tree: &Path) -> PathBuf {
        self.copies += 1;
        let to = self.mirrors.path().join(self.copies.to_string());
        let (from, shown) = (tree.display(), to.display());
        // Without the store, in which things come and go in the background.
        let copy = format!(
            "mkdir '{shown}'; chmod --reference='{from}' '{shown}'
             find '{from}' -mindepth 1 -maxdepth 1 ! -name .branching -exec cp -a -t '{shown}' {{}} +"
        );
        shell(self.mirrors.path(), &copy);
        to
    }

    fn replace_main(&mut self, by: &Path) {
        fs::remove_dir_all(self.main()).unwrap();
        fs::rename(by, self.main()).unwrap();
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|at| self.members[*at].is_some()).collect()
    }

    fn leaves(&self) -> Vec<usize> {
        let is_parent = |at: usize| self.members.iter().flatten().any(|one| one.parent == Some(at));
        self.alive().into_iter().filter(|at| !is_parent(*at)).collect()
    }

    fn pick(&mut self, from: &[usize]) -> Option<usize> {
        if from.is_empty() { None } else { Some(from[self.random.below(from.len())]) }
    }

    fn member(&self, at: usize) -> &Member {
        self.members[at].as_ref().unwrap()
    }

    fn drop_below(&mut self, parent: Option<usize>) {
        for at in self.alive() {
            if self.members[at].as_ref().is_some_and(|member| member.parent == parent) {
                self.drop_below(Some(at));
                self.drop_stale_below(at);
                let gone = self.members[at].take().unwrap();
                self.mount.run(&["abort", &gone.name], &[]); // its parent's end may have taken it along
            }
        }
    }

    /// Members without children that are stale from now on are kept as that.
    fn keep_stale_below(&mut self, parent: Option<usize>) {
        const STALE_MAX: usize = 4;
        for at in self.leaves() {
            if self.stale.len() < STALE_MAX && self.member(at).parent == parent {
                let member = self.members[at].take().unwrap();
                self.stale.push((at, member));
            }
        }
    }

    /// Before a member ends.
    fn drop_stale_below(&mut self, parent: usize) {
        let (gone, kept) = std::mem::take(&mut self.stale)
            .into_iter()
            .partition::<Vec<_>, _>(|(_, member)| member.parent == Some(parent));
        self.stale = kept;
        for (_, member) in gone {
            self.mount.abort(&member.name);
        }
    }

    /// Rebases a stale branch, or a live one.
    fn rebase(&mut self) {
        let (at, member) = if self.stale.is_empty() || self.random.below(4) == 0 {
            let leaves = self.leaves();
            let Some(at) = self.pick(&leaves) else { return };
            self.release_writers(at);
            (at, self.members[at].take().unwrap())
        } else {
            let number = self.random.below(self.stale.len());
            if let Some(parent) = self.stale[number].1.parent {
                if self.members[parent].is_none() {
                    return self.refuse_below_stale(number);
                }
                self.release_writers(parent);
            }
            self.stale.swap_remove(number)
        };
        let above = member.parent.map_or_else(|| self.main(), |at| self.member(at).tree.clone());
        let (ours, theirs) = (outline(&member.tree), outline(&above));
        let when = format!("{}, {} rebased", self.policy, member.name);
        let done = self.run_in(&member.name, &["rebase", &member.name]);
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(said.contains("its parent has changed at the same paths"), "{when}: {said}");
            assert!(self.commits > member.forked, "{when}: a conflict with nobody: {said}");
            return self.mount.abort(&member.name);
        }
        let branch = self.mount.branch(&member.name);
        let wanted = merged(&ours, &member.origin, theirs.clone());
        assert_same(&outline(&branch), &wanted, &when);
        let tree = self.copy(&branch);
        self.note_versions(&tree);
        self.members[at] = Some(Member { tree, origin: theirs, forked: self.commits, ..member });
    }

    /// The parent of a stale member is stale, too.
    fn refuse_below_stale(&self, number: usize) {
        let refused = self.mount.run(&["rebase", &self.stale[number].1.name], &[]);
        let said = common::refusal(&refused);
        assert!(said.contains(" is stale"), "{said}");
    }

    fn work(&mut self, operations: &[u64]) {
        let leaves = self.leaves();
        let Some(at) = self.pick(&leaves) else { return };
        let (branch, tree) =
            (self.mount.branch(&self.member(at).name), self.member(at).tree.clone());
        for operation in operations.iter().copied().map(operation_of) {
            if matches!(operation, Operation::Link(..)) {
                continue;
            }
            let (found, wanted) = (apply(&branch, &operation), apply(&tree, &operation));
            assert_eq!(found, wanted, "{}: {operation:?}", self.policy);
            self.note_versions(&tree);
        }
    }

    fn fork(&mut self) {
        let mut parents: Vec<Option<usize>> = self.alive().into_iter().map(Some).collect();
        parents.push(None);
        if parents.len() > 6 {
            return;
        }
        let parent = parents[self.random.below(parents.len())];
        let name = format!("b{}", self.members.len());
        let from = match parent {
            Some(at) => {
                self.release_writers(at);
                let above = self.member(at);
                let (above, tree) = (above.name.clone(), above.tree.clone());
                succeed(&self.run_in(&above, &["create", "--parent", &above, &name]));
                tree
            }
            None => {
                self.mount.create(&name);
                self.main()
            }
        };
        let origin = outline(&from);
        let tree = self.copy(&from);
        let forked = self.commits;
        self.members.push(Some(Member { name, parent, tree, origin, forked }));
    }

    fn commit(&mut self) {
        let leaves = self.leaves();
        let Some(at) = self.pick(&leaves) else { return };
        self.release_writers(at);
        self.drop_stale_below(at);
        let (name, parent) = (self.member(at).name.clone(), self.member(at).parent);
        let above = parent.map_or_else(|| self.main(), |at| self.member(at).tree.clone());
        let before = if parent.is_none() { Some(self.copy(&above)) } else { None };
        let commits = self.history();
        let done = self.run_in(&name, &["commit", &name]);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        let (ours, theirs, origin) =
            (outline(&self.member(at).tree), outline(&above), &self.member(at).origin);
        if !done.status.success() {
            let by_reading = self.policy == "serializable"
                && said.contains("another commit since the fork changed files that it read");
            let by_writing = said.contains("another commit since the fork changed the same paths");
            if self.is_full && said.contains("No space left") {
                return;
            }
            assert!(by_writing || by_reading, "{said}");
            assert_ne!(&theirs, origin, "a conflict with nobody: {said}");
            return;
        }
        let wanted = merged(&ours, origin, theirs);
        let changes_nothing = done.stdout.is_empty(); // it lists the changes
        assert!(!changes_nothing || &ours == origin, "a change is left out");
        self.members[at] = None;
        if changes_nothing {
            assert_eq!(self.history(), commits, "a commit of nothing");
        } else {
            self.commits += 1;
            if self.policy == "first-winner" {
                self.keep_stale_below(parent);
                self.drop_below(parent);
            }
        }
        let now = match parent {
            Some(at) => self.mount.branch(&self.member(at).name),
            None => self.mount.base(),
        };
        let when = format!("{}, {name} committed", self.policy);
        assert_same(&outline(&now), &wanted, &when);
        let merged = self.copy(&now);
        match parent {
            Some(at) => {
                let tree = self.member(at).tree.clone();
                fs::remove_dir_all(&tree).unwrap();
                fs::rename(merged, tree).unwrap();
            }
            None if changes_nothing => {}
            None => {
                self.past.extend(before);
                self.future.clear();
                self.replace_main(&merged);
            }
        }
    }

    /// The numbers of the commits that can be undone, and of those that can be done again.
    fn history(&self) -> Vec<serde_json::Value> {
        self.mount.ask("history")["entries"].as_array().unwrap().clone()
    }

    fn abort(&mut self) {
        let alive = self.alive();
        let Some(at) = self.pick(&alive) else { return };
        self.drop_stale_below(at);
        self.mount.abort(&self.member(at).name.clone());
        let gone = self.members[at].take().unwrap();
        drop(gone);
        self.drop_below(Some(at));
    }

    fn revert(&mut self, verb: &str) {
        let is_undo = verb == "undo";
        let Some(to) = (if is_undo { self.past.pop() } else { self.future.pop() }) else { return };
        let is_looked_at = self.members.iter().flatten().any(|member| member.parent.is_none());
        if self.policy == "first-winner" && is_looked_at {
            self.drop_below(None);
        }
        let now = self.copy(&self.main());
        succeed(&self.mount.run(&[verb], &[]));
        self.commits += 1;
        if is_undo {
            self.future.push(now)
        } else {
            self.past.push(now)
        }
        self.replace_main(&to);
    }

    fn restart(&mut self, by_kill: bool) {
        self.held.clear();
        self.mapped.clear();
        self.writers.clear();
        if by_kill {
            self.mount.kill()
        } else {
            self.mount.unmount()
        }
        self.mount.mount_with(&["--policy", self.policy]);
    }

    fn compare(&mut self, event: &str) {
        let policy = self.policy;
        let when = |what: &str| format!("{policy}, {event}: {what}");
        self.read_held(&when("held"));
        self.drop_writers();
        self.read_mapped(&when("mapped"));
        if !self.is_small_disk {
            let outside = self.mount.directory.path().join("outside");
            let outside = fs::read_to_string(outside).unwrap();
            assert_eq!(outside, "one\n", "{}", when("the name outside"));
        }
        assert_same(&outline(&self.mount.base()), &outline(&self.main()), &when("main"));
        for member in self.members.iter().flatten() {
            let branch = self.mount.branch(&member.name);
            assert_same(&outline(&branch), &outline(&member.tree), &when(&member.name));
        }
    }

    fn run(&mut self, events: &[Event]) {
        for (number, Event { kind, seed, operations }) in events.iter().enumerate() {
            self.random = Random(*seed);
            match kind {
                0..=5 => self.work(operations),
                6..=9 => self.fork(),
                10 | 11 => self.commit(),
                12 => self.abort(),
                13 => self.revert("undo"),
                14 => self.revert("redo"),
                15 | 16 => self.rebase(),
                _ => {
                    let by_kill = self.random.below(2) == 0;
                    self.restart(by_kill);
                }
            }
            if self.random.below(2) == 0 {
                self.hold();
            }
            // On a full disk a store to memory would fail that no file has the block of.
            if !self.is_small_disk && self.random.below(4) == 0 {
                self.write_mapped();
            }
            if self.is_small_disk && self.random.below(6) == 0 {
                self.fill_disk();
            }
            self.compare(&format!("event {number} ({kind})"));
        }
    }
}

#[test]
fn families_of_branches_are_what_ordinary_directories_would_be() {
    let policies: &[&'static str] = if common::driver() == "overlay" {
        &["first-winner"]
    } else {
        &["first-winner", "snapshot", "serializable"]
    };
    // However long it is let run, each policy gets its turn.
    check(common::rounds(3, 200), events(100), |events| {
        for policy in policies {
            Family::new(policy, Disk::mounted("true"), false).run(&events);
        }
    });
}

#[test]
fn families_of_branches_lose_and_invent_nothing_on_full_disks() {
    if common::driver() == "overlay" {
        return; // overlayfs copies up by itself
    }
    let disks =
        ["mkfs.ext4 -q -m 0 -b 1024", "mkfs.ext4 -q -m 0 -b 4096", "mkfs.xfs -q -m reflink=0"];
    let (cases, events) = (common::rounds(1, 60), events(common::rounds(20, 80)));
    check(cases, events, |events| {
        for make in disks {
            let size = if make.contains("xfs") { "300M" } else { "32M" };
            Family::new("first-winner", Disk::image(size, make), true).run(&events);
        }
    });
}
