//! Power cuts of a real file system under a real daemon. The base lies on a device that records its writes and flushes
//! (`common/recorder.rs`). One run of all verbs gives as many crash states as are asked for: a moment, and a part of what was
//! written since the last flush. Each is mounted, which replays the file system's journal, and the workspace over it. The base
//! must be as before or after the verb that was running, and what a verb or an fsync has returned for must be there.
//! Recovery is cut in the same way.
//!
//! Meanwhile other programs sync files and directories of the base: btrfs then writes these ahead of other changes.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use common::disk::Disk;
use common::recorder::Recording;
use common::work::Random;
use common::{Object, assert_same, rounds, shell, snapshot_by_names, succeed};

/// How to make an image, and options with which a copy of it is mounted.
const FILE_SYSTEMS: [(&str, &str); 3] = [
    ("truncate -s 96M image; mkfs.ext4 -q image", "loop"),
    ("truncate -s 320M image; mkfs.xfs -q image", "loop,nouuid"),
    ("truncate -s 256M image; mkfs.btrfs -q image", "loop"),
];

/// Here a sync of one file or directory writes nothing else. The others write all names that were changed before it.
const WITHOUT_JOURNAL: (&str, &str) =
    ("truncate -s 96M image; mkfs.ext4 -q -O ^has_journal image", "loop");

type Tree = BTreeMap<PathBuf, Object>;

/// What holds from the return of a verb to that of the next one.
struct Stage {
    verb: &'static str,
    /// When it began and returned.
    begun: u64,
    returned: u64,
    base: Tree,
    /// A branch, and its content.
    branch: Option<(&'static str, Tree)>,
}

/// Changes of every kind; among them directories that come back, and one that is replaced around what it keeps.
const WORK: &str = "for i in $(seq 1 3 30); do echo new > many/$i; done; rm many/2; mkdir added; echo new > added/file
    mv e t; mv t e; mv d t; mkdir d; mv t/in d/in; rm -r t; echo new > d/b; echo new > marker; chmod 700 many; mv many/5 moved";

const MORE_WORK: &str = "for i in $(seq 3 3 30); do echo more > many/$i; done; rm -r added";

/// A history of a workspace on a device that is recorded.
struct History {
    recording: Recording,
    stages: Vec<Stage>,
    /// When a file had been synced in the branch `kept`, which the first commit makes stale.
    synced: u64,
    options: &'static str,
    /// Of the recorded disk, which is not mounted any more.
    disk: Disk,
}

/// Syncs files and directories of the base until `ends`.
fn sync_again_and_again(base: &Path, ends: &AtomicBool) {
    while !ends.load(Ordering::Relaxed) {
        for path in ["many", "many/1", "d", "marker", "e", "d/in/file", "many/4", "added", "."] {
            if let Ok(file) = File::open(base.join(path)) {
                file.sync_all().unwrap();
            }
        }
    }
}

impl History {
    fn new((make, options): (&str, &'static str), is_with_syncs: bool) -> Self {
        let disk = Disk::recorded(make);
        shell(
            &disk.base(),
            "rmdir lost+found 2>/dev/null || true
             mkdir -p d/in e many; for i in $(seq 30); do echo old > many/$i; done; seq 9 > d/in/file
             echo old > d/a; echo old > e/file; echo old > marker; ln many/1 linked; sync -f .",
        );
        disk.mount();
        let now = || disk.recorder().now();
        let kept = disk.create("kept");
        let mut file = File::create(kept.join("file")).unwrap();
        file.write_all(b"synced").unwrap();
        file.sync_all().unwrap();
        drop(file);
        let synced = now();
        let base = snapshot_by_names(&disk.base());
        let mut stages =
            vec![Stage { verb: "create", begun: 0, returned: synced, base, branch: None }];
        let mut run = |words: &[&'static str], branch: Option<&'static str>| {
            let begun = now();

            succeed(&disk.run(words, &[]));

            let returned = now();
            let base = snapshot_by_names(&disk.base());
            let branch = branch.map(|name| (name, snapshot_by_names(&disk.branch(name))));
            stages.push(Stage { verb: words[0], begun, returned, base, branch });
        };
        let (over, path) = (AtomicBool::new(!is_with_syncs), disk.base());
        thread::scope(|scope| {
            scope.spawn(|| sync_again_and_again(&path, &over));
            shell(&disk.create("branch"), WORK);
            run(&["commit", "branch"], None);
            run(&["undo"], None);
            run(&["redo"], None);
            shell(&disk.create("parts"), MORE_WORK);
            run(&["commit", "--only", "many", "parts"], None);
            shell(&disk.create("others"), "mv d/in d/moved; echo most > marker; ln marker other");
            run(&["commit", "others"], None);
            disk.create("outer");
            shell(
                &disk.create_below("outer", "inner"),
                "echo inner > marker; rm -r d/moved; mkdir x",
            );
            run(&["commit", "inner"], Some("outer"));
            run(&["commit", "outer"], None);
            over.store(true, Ordering::Relaxed);
        });
        disk.unmount();
        let recording = disk.recorder().recording();
        disk.detach();
        Self { recording, stages, synced, options, disk }
    }

    /// What may hold after a cut behind the first `count` records.
    fn possible(&self, count: usize) -> &[Stage] {
        let has_returned = |stage: &&Stage| self.recording.has(count, stage.returned);
        let last = self.stages.iter().take_while(has_returned).count() - 1;
        let next = self.stages.get(last + 1);
        let has_begun = next.is_some_and(|next| self.recording.has(count, next.begun));
        &self.stages[last..=last + usize::from(has_begun)]
    }

    /// Cuts at a random moment.
    fn cut(&self, random: &mut Random) {
        let first = self.recording.until(self.synced);
        let count = first + random.below(self.recording.len() - first + 1);
        self.cut_at(count, random);
    }

    /// Cuts behind the first `count` records, and looks at what recovery makes of it; now and then recovery is cut too.
    fn cut_at(&self, count: usize, random: &mut Random) {
        let image = self.disk.directory.path().join("cut");
        self.recording.cut(count, random, &image);
        let possible = self.possible(count);
        let verbs: Vec<&str> = possible.iter().map(|stage| stage.verb).collect();
        let when = format!("{verbs:?}, cut after {count} of {} records", self.recording.len());
        if random.below(3) > 0 {
            let mount =
                format!("mv '{}' image; mount -o {} image base", image.display(), self.options);
            return self.check(&Disk::mounted(&mount), possible, &when);
        }
        let again = Disk::recorded(&format!("mv '{}' image", image.display()));
        self.check(&again, possible, &when);
        let recording = again.recorder().recording();
        again.detach();
        let image = again.directory.path().join("cut");
        let count = random.below(recording.len() + 1);
        recording.cut(count, random, &image);
        let mount = format!("mv '{}' image; mount -o {} image base", image.display(), self.options);
        let when = format!("{when}; recovery cut after {count} of {} records", recording.len());
        self.check(&Disk::mounted(&mount), possible, &when);
    }

    fn check(&self, disk: &Disk, possible: &[Stage], when: &str) {
        assert!(disk.has_own_uuid(), "{when}: an earlier file system has not ended");
        disk.mount();
        let found = snapshot_by_names(&disk.base());
        let is_shown = |stage: &&Stage| {
            stage.base == found
                && stage.branch.as_ref().is_none_or(|(name, tree)| {
                    let path = disk.branch(name);
                    path.exists() && snapshot_by_names(&path) == *tree
                })
        };
        if !possible.iter().any(|stage| is_shown(&stage)) {
            for stage in possible {
                println!("{when}: not as after {}", stage.verb);
            }
            let last = possible.last().unwrap();
            assert_same(&found, &last.base, when);
            let (name, tree) = last.branch.as_ref().unwrap();
            assert_same(&snapshot_by_names(&disk.branch(name)), tree, when);
        }
        if possible[0].verb == "create" && found == possible[0].base {
            let kept = fs::read(disk.branch("kept").join("file")).unwrap();
            assert_eq!(kept, b"synced", "{when}");
        }
        check_store(disk, when);
    }
}

/// The store of a mount, which is unmounted for it, is clean.
fn check_store(disk: &Disk, when: &str) {
    disk.unmount();
    disk.assert_clean_store(when);
}

/// Few cuts in every run, many with `BRANCHFS_SOAK`; a cut is repeated by its seed in a recording that is much the same.
fn check(is_with_syncs: bool) {
    let deadline = common::soak_deadline();
    let recordings = common::soak_skip() as u64 + 1..=rounds(1, 20) as u64;
    for recording in recordings {
        for (number, file_system) in FILE_SYSTEMS.into_iter().enumerate() {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return println!("the soak ends in recording {recording}");
            }
            let history = History::new(file_system, is_with_syncs);
            let mut random = Random(recording);
            for stage in &history.stages {
                println!("{}: as {} returns", file_system.0, stage.verb);
                let count = history.recording.until(stage.returned);
                history.cut_at(count, &mut random);
            }
            for cut in 1..=rounds(6, 20) as u64 {
                let seed = 1_000_000 * recording + 1000 * number as u64 + cut;
                println!("{}: seed {seed}", file_system.0);
                history.cut(&mut Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            }
        }
    }
}

#[test]
fn every_verb_and_recovery_are_whole_or_nothing_after_a_power_cut() {
    check(false);
}

#[test]
fn programs_that_sync_parts_of_the_base_meanwhile_change_nothing_about_it() {
    check(true);
}

/// The sync of the base at the end of a transaction cannot be left out, although most file systems hide that. Here nothing
/// recovers: the store is not synced as a whole.
#[test]
fn all_that_a_verb_has_changed_in_the_base_is_on_disk_when_it_returns() {
    let history = History::new(WITHOUT_JOURNAL, false);
    for Stage { verb, returned, base, .. } in &history.stages {
        let image = history.disk.directory.path().join("cut");
        history.recording.cut_to_flushed(history.recording.until(*returned), &image);
        let mount = format!("mv '{}' image; mount -o loop image base", image.display());
        let found = Disk::mounted(&mount);
        assert_same(&snapshot_by_names(&found.base()), base, &format!("after {verb}"));
    }
}

/// The daemon is killed (`kill -9`) when it has made a branch, and perhaps a file, and nothing was synced there. What a
/// program syncs there later, before anything else is synced, is there after a power cut: with the overlay driver without
/// a daemon, else by way of the next one.
#[test]
fn the_first_sync_in_a_branch_after_its_daemon_was_killed_survives_a_power_cut() {
    for (number, (make, options)) in FILE_SYSTEMS.into_iter().enumerate() {
        for is_written_before in [false, true] {
            let disk = Disk::recorded(make);
            disk.mount();
            let is_presented = common::driver() == "overlay";
            let mut path = disk.create("outer");
            let mut branches = vec!["outer"];
            if !is_presented {
                path = disk.create_below("outer", "inner"); // FUSE alone presents it
                branches.insert(0, "inner");
            }
            let write = |directory: &Path| fs::write(directory.join("file"), "synced").unwrap();
            if is_written_before {
                write(&path);
            }
            let branch = File::open(&path).unwrap();
            let directory = if is_presented {
                disk.kill_alone();
                PathBuf::from(format!("/proc/self/fd/{}", branch.as_raw_fd()))
            } else {
                disk.kill();
                disk.mount();
                path
            };
            if !is_written_before {
                write(&directory);
            }
            File::open(directory.join("file")).unwrap().sync_all().unwrap();
            let synced = disk.recorder().now();
            drop(branch);
            if is_presented {
                disk.take_away();
            } else {
                disk.unmount();
            }
            disk.detach();
            let recording = disk.recorder().recording();
            let first = recording.until(synced);
            let mut random = Random(number as u64 + 1);
            for cut in 0..rounds(2, 40) {
                let is_first = cut == 0;
                let later = if is_first { 0 } else { random.below(recording.len() - first + 1) };
                let when = format!(
                    "{make}: {later} records after the sync, written before the kill: {is_written_before}"
                );
                let image = disk.directory.path().join("cut");
                recording.cut(first + later, &mut random, &image);
                let mount =
                    format!("mv '{}' image; mount -o {options} image base", image.display());
                let found = Disk::mounted(&mount);
                found.mount();
                let content = fs::read(found.branch(branches[0]).join("file")).expect(&when);
                assert_eq!(content, b"synced", "{when}");
                branches.iter().for_each(|branch| found.commit(branch));
                assert_eq!(fs::read(found.base().join("file")).unwrap(), b"synced", "{when}");
                check_store(&found, &when);
            }
        }
    }
}
