//! Random work in a branch and the same work in an ordinary directory: both must show the same, step by step, and the
//! base must be that directory after the commit. The reference is the native file system itself.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::disk::Disk;
use common::work::{Operation, Random, apply, operation};
use common::{Content, Mount, Object, assert_same, shell, snapshot, snapshot_by_names, succeed};
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

/// Runs `steps` random operations in each of `rounds` branches that are committed one after the other.
fn run(seed: u64, rounds: usize, steps: usize) {
    let mut random = Random(seed);
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
    for round in 0..rounds {
        let branch = mount.create(&format!("round-{round}"));
        for step in 0..steps {
            let operation = operation(&mut random);
            let (found, wanted) = (apply(&branch, &operation), apply(&mirror, &operation));
            assert_eq!(found, wanted, "seed {seed}, round {round}, step {step}: {operation:?}");
        }
        settle_times(&branch);
        settle_times(&mirror);
        let wanted = seen(&mirror);
        assert_same(&seen(&branch), &wanted, &format!("seed {seed}, round {round}, in the branch"));
        mount.unmount();
        mount.mount();
        assert_same(
            &seen(&branch),
            &wanted,
            &format!("seed {seed}, round {round}, after a remount"),
        );
        mount.commit(&format!("round-{round}"));
        assert_same(
            &snapshot_by_names(&mount.base()),
            &snapshot_by_names(&mirror),
            &format!("seed {seed}, round {round}, after the commit"),
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
    let seeds = if common::driver() == "overlay" { 20 } else { 40 };
    for seed in 1..=seeds {
        run(seed, 2, 150);
    }
}

/// A tree as a family of branches is compared by: hard links below a branch and times, which others' work moves, are
/// compared elsewhere.
fn outline(root: &Path) -> BTreeMap<PathBuf, Object> {
    let mut tree = snapshot(root);
    tree.values_mut().for_each(|object| (object.mtime, object.nlink) = ((0, 0), 0));
    tree
}

/// A branch of the model: a copy of its parent from the fork on.
struct Member {
    name: String,
    /// Position among the members; `None` is main.
    parent: Option<usize>,
    tree: PathBuf,
    /// What the parent was at the fork.
    origin: BTreeMap<PathBuf, Object>,
}

/// Branches of branches that work, commit, go, and come back after a crash; every one is compared with an ordinary
/// directory after each event, and so is main.
struct Family {
    seed: u64,
    random: Random,
    policy: &'static str,
    mount: Disk,
    /// Readers that stay open while files are copied up, committed and removed.
    held: Vec<(String, File)>,
    /// Every content that a file ever had: a reader must find one of these as a whole.
    versions: HashSet<Vec<u8>>,
    is_full: bool,
    /// The base is on a file system of its own, and can be filled.
    is_small_disk: bool,
    mirrors: tempfile::TempDir,
    members: Vec<Option<Member>>,
    /// Copies of main: before each commit that can be undone, and after each that was.
    past: Vec<PathBuf>,
    future: Vec<PathBuf>,
    copies: usize,
}

impl Family {
    /// On the file system of `disk`: either a small one of its own, or the file `a/a` has another name outside of it.
    fn new(seed: u64, policy: &'static str, disk: Disk, is_small_disk: bool) -> Self {
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
            seed,
            random: Random(seed),
            policy,
            mount,
            held: Vec::new(),
            versions: HashSet::new(),
            is_full: false,
            is_small_disk,
            mirrors: tempfile::tempdir().unwrap(),
            members: Vec::new(),
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

    /// Opens some file, and keeps it open.
    fn hold(&mut self) {
        const HELD_MAX: usize = 12;
        let alive = self.alive();
        let Some(at) = self.pick(&alive) else { return };
        let (name, tree) = (self.member(at).name.clone(), self.member(at).tree.clone());
        let tree = snapshot(&tree);
        let is_file = |object: &Object| matches!(object.content, Content::File(_));
        let files: Vec<&PathBuf> =
            tree.iter().filter(|(_, object)| is_file(object)).map(|(path, _)| path).collect();
        if files.is_empty() || self.held.len() >= HELD_MAX {
            return;
        }
        let path = files[self.random.below(files.len())];
        let file = File::open(self.mount.branch(&name).join(path)).unwrap();
        self.held.push((format!("{name}: {}", path.display()), file));
    }

    /// Reads through everything that is held: the kernel's pages of it are filled.
    fn read_held(&mut self, when: &str) {
        let versions = &self.versions;
        self.held.retain(|(what, file)| {
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
                let gone = self.members[at].take().unwrap();
                self.mount.run(&["abort", &gone.name], &[]); // its parent's end may have taken it along
            }
        }
    }

    fn work(&mut self) {
        let leaves = self.leaves();
        let Some(at) = self.pick(&leaves) else { return };
        let (branch, tree) =
            (self.mount.branch(&self.member(at).name), self.member(at).tree.clone());
        for _ in 0..8 {
            let operation = operation(&mut self.random);
            if matches!(operation, Operation::Link(..)) {
                continue;
            }
            let (found, wanted) = (apply(&branch, &operation), apply(&tree, &operation));
            assert_eq!(found, wanted, "seed {}, {}: {operation:?}", self.seed, self.policy);
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
                let above = self.member(at);
                let (above, tree) = (above.name.clone(), above.tree.clone());
                self.mount.create_below(&above, &name);
                tree
            }
            None => {
                self.mount.create(&name);
                self.main()
            }
        };
        let origin = outline(&from);
        let tree = self.copy(&from);
        self.members.push(Some(Member { name, parent, tree, origin }));
    }

    fn commit(&mut self) {
        let leaves = self.leaves();
        let Some(at) = self.pick(&leaves) else { return };
        let (name, parent) = (self.member(at).name.clone(), self.member(at).parent);
        let above = parent.map_or_else(|| self.main(), |at| self.member(at).tree.clone());
        let before = if parent.is_none() { Some(self.copy(&above)) } else { None };
        let commits = self.history();
        let done = self.mount.run(&["commit", &name], &[]);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        let (ours, theirs, origin) =
            (outline(&self.member(at).tree), outline(&above), &self.member(at).origin);
        if !done.status.success() {
            let by_reading = self.policy == "serializable"
                && said.contains("others committed changes of what it read");
            let by_writing = said.contains("others committed changes of the same paths");
            if self.is_full && said.contains("No space left") {
                return;
            }
            assert!(by_writing || by_reading, "{said}");
            assert_ne!(&theirs, origin, "seed {}: a conflict with nobody: {said}", self.seed);
            return;
        }
        // What the branch changed, over what the parent is now: nothing of either may be lost.
        let mut wanted = theirs;
        for path in ours.keys().chain(origin.keys()) {
            match (ours.get(path), origin.get(path)) {
                (one, other) if one == other => {}
                (Some(one), _) => drop(wanted.insert(path.clone(), one.clone())),
                (None, _) => drop(wanted.remove(path)),
            }
        }
        let changes_nothing = done.stdout.is_empty(); // it lists the changes
        assert!(!changes_nothing || &ours == origin, "seed {}: a change is left out", self.seed);
        self.members[at] = None;
        if changes_nothing {
            assert_eq!(self.history(), commits, "seed {}: a commit of nothing", self.seed);
        } else if self.policy == "first-winner" {
            self.drop_below(parent);
        }
        let now = match parent {
            Some(at) => self.mount.branch(&self.member(at).name),
            None => self.mount.base(),
        };
        let when = format!("seed {}, {}, {name} committed", self.seed, self.policy);
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
        if is_undo {
            self.future.push(now)
        } else {
            self.past.push(now)
        }
        self.replace_main(&to);
    }

    fn restart(&mut self, by_kill: bool) {
        self.held.clear();
        if by_kill {
            self.mount.kill()
        } else {
            self.mount.unmount()
        }
        self.mount.mount_with(&["--policy", self.policy]);
    }

    fn compare(&mut self, event: &str) {
        let (seed, policy) = (self.seed, self.policy);
        let when = |what: &str| format!("seed {seed}, {policy}, {event}: {what}");
        self.read_held(&when("held"));
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

    fn run(&mut self, events: usize) {
        for number in 0..events {
            let event = self.random.below(16);
            match event {
                0..=5 => self.work(),
                6..=9 => self.fork(),
                10 | 11 => self.commit(),
                12 => self.abort(),
                13 => self.revert("undo"),
                14 => self.revert("redo"),
                _ => {
                    let by_kill = self.random.below(2) == 0;
                    self.restart(by_kill);
                }
            }
            if self.random.below(2) == 0 {
                self.hold();
            }
            if self.is_small_disk && self.random.below(6) == 0 {
                self.fill_disk();
            }
            self.compare(&format!("event {number} ({event})"));
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
    for seed in 1..=common::rounds(3, 200) as u64 {
        for policy in policies {
            Family::new(seed, policy, Disk::mounted("true"), false).run(50);
        }
    }
}

#[test]
fn families_of_branches_lose_and_invent_nothing_on_full_disks() {
    if common::driver() == "overlay" {
        return; // overlayfs copies up by itself
    }
    let disks =
        ["mkfs.ext4 -q -m 0 -b 1024", "mkfs.ext4 -q -m 0 -b 4096", "mkfs.xfs -q -m reflink=0"];
    for seed in 1..=common::rounds(1, 60) as u64 {
        for (number, make) in disks.iter().enumerate() {
            let size = if make.contains("xfs") { "300M" } else { "32M" };
            let seed = 1000 * (number as u64 + 1) + seed;
            Family::new(seed, "first-winner", Disk::image(size, make), true)
                .run(common::rounds(10, 40));
        }
    }
}
