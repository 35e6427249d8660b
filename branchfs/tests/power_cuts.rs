//! Power cuts of a real file system under a real daemon. The base lies on a loop device, and the file system is shut down
//! without writing its journal (`FS_IOC_SHUTDOWN`): all that no sync has made durable is lost, as in a power cut. The copy of
//! the device is then mounted, which replays its journal, and the workspace over it.
//!
//! The kernel this runs on need not have the targets of the device mapper that record writes.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::disk::Disk;
use common::{assert_same, kill_daemon, rounds, shell, snapshot_by_names, succeed};

/// How to make a file system, and options with which a copy of it is mounted beside it.
const FILE_SYSTEMS: [(&str, &str, &str); 2] =
    [("96M", "mkfs.ext4 -q", "loop"), ("320M", "mkfs.xfs -q", "loop,nouuid")];

/// A process that is ready to shut a file system down.
struct Switch(Child);

impl Switch {
    fn new(directory: &Path) -> Self {
        const SCRIPT: &str = "
import fcntl, os, struct, sys, time
directory = os.open(sys.argv[1], os.O_RDONLY)
print('ready', flush=True)
time.sleep(float(sys.stdin.readline()))
SHUTDOWN, WITHOUT_JOURNAL = 0x8004587D, 2  # FS_IOC_SHUTDOWN
fcntl.ioctl(directory, SHUTDOWN, struct.pack('I', WITHOUT_JOURNAL))
";
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT]).arg(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn cut_after(&mut self, delay: Duration) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{}", delay.as_secs_f64()).unwrap();
    }

    fn wait(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

/// A workspace on a file system of its own.
fn workspace((size, make, _): (&str, &str, &str)) -> Disk {
    let disk = Disk::image(size, make);
    shell(
        &disk.base(),
        "mkdir -p d/in e many; for i in $(seq 30); do echo old > many/$i; done; seq 9 > d/in/file
         echo old > d/a; echo old > e/file; echo old > marker; ln many/1 linked; sync -f .",
    );
    disk.mount();
    disk
}

/// Changes of every kind; among them directories that come back, and one that is replaced around what it keeps.
const WORK: &str = "for i in $(seq 1 3 30); do echo new > many/$i; done; rm many/2; mkdir added; echo new > added/file
    mv e t; mv t e; mv d t; mkdir d; mv t/in d/in; rm -r t; echo new > d/b; echo new > marker; chmod 700 many; mv many/5 moved";

/// What is found after a power cut: the daemon is gone, and the device has what was durable.
fn after_power_cut(disk: &Disk, daemon: i32, (_, _, options): (&str, &str, &str)) -> Disk {
    kill_daemon(daemon);
    let _ = rustix::mount::unmount(disk.mountpoint(), rustix::mount::UnmountFlags::DETACH);
    let image = disk.directory.path().join("image");
    let copy =
        format!("cp --sparse=always '{}' image; mount -o {options} image base", image.display());
    let after = Disk::mounted(&copy);
    after.mount();
    after
}

fn check(verb: &str, file_system: (&str, &str, &str), rounds: usize) {
    let mut duration = Duration::ZERO;
    let (mut old_count, mut new_count) = (0, 0);
    for round in 0..=rounds {
        let disk = workspace(file_system);
        let kept = disk.create("kept");
        let mut old = snapshot_by_names(&disk.base());
        let branch = disk.create("branch");
        shell(&branch, WORK);
        let mut new = snapshot_by_names(&branch);
        let mut words = vec![verb];
        if verb == "commit" {
            words.push("branch");
            let mut file = fs::File::create(kept.join("file")).unwrap();
            file.write_all(b"synced").unwrap();
            file.sync_all().unwrap();
        } else {
            disk.abort("kept");
            disk.commit("branch");
            std::mem::swap(&mut old, &mut new);
        }
        if verb == "redo" {
            succeed(&disk.run(&["undo"], &[]));
            std::mem::swap(&mut old, &mut new);
        }
        if round == 0 {
            let start = Instant::now();
            succeed(&disk.run(&words, &[]));
            duration = start.elapsed();
            continue;
        }
        let (mut switch, daemon) = (Switch::new(&disk.base()), disk.daemon());
        let delay = duration.mul_f64(1.2 * round as f64 / rounds as f64);
        switch.cut_after(delay);
        let has_returned = disk.run(&words, &[]).status.success();
        switch.wait();
        let after = after_power_cut(&disk, daemon, file_system);
        let when = format!("{verb} on {file_system:?}, cut after {delay:?}");
        let found = snapshot_by_names(&after.base());
        let marker = |tree: &std::collections::BTreeMap<_, common::Object>| {
            tree[Path::new("marker")].content.clone()
        };
        let is_new = marker(&found) == marker(&new);
        assert_same(&found, if is_new { &new } else { &old }, &when);
        assert!(is_new || !has_returned, "{when}: it had returned");
        if verb == "commit" && !is_new {
            assert_eq!(fs::read(after.branch("kept").join("file")).unwrap(), b"synced", "{when}");
        }
        *if is_new { &mut new_count } else { &mut old_count } += 1;
        succeed(&after.run(&["unmount"], &[]));
        let checked = Command::new(common::PROGRAM).arg("fsck").arg(after.base()).output().unwrap();
        assert!(checked.status.success(), "{when}: {}", String::from_utf8_lossy(&checked.stdout));
    }
    println!("{verb} on {file_system:?}, {duration:?}: {old_count} old, {new_count} new");
}

#[test]
fn a_commit_is_whole_or_nothing_after_a_power_cut() {
    FILE_SYSTEMS.into_iter().for_each(|one| check("commit", one, rounds(5, 60)));
}

#[test]
fn an_undo_is_whole_or_nothing_after_a_power_cut() {
    FILE_SYSTEMS.into_iter().take(rounds(1, 2)).for_each(|one| check("undo", one, rounds(5, 60)));
}

#[test]
fn a_redo_is_whole_or_nothing_after_a_power_cut() {
    FILE_SYSTEMS.into_iter().take(rounds(1, 2)).for_each(|one| check("redo", one, rounds(5, 60)));
}

#[test]
fn a_file_synced_in_a_new_branch_survives_a_power_cut() {
    for file_system in FILE_SYSTEMS {
        for round in 0..rounds(2, 20) {
            let disk = workspace(file_system);
            if round % 2 == 1 {
                // The record of a branch outlives the daemon that wrote it; the next one has to sync it.
                disk.create("branch");
                disk.kill();
                disk.mount();
            }
            let (mut switch, daemon) = (Switch::new(&disk.base()), disk.daemon());
            let branch = if round % 2 == 0 { disk.create("branch") } else { disk.branch("branch") };
            for name in ["new", "marker"] {
                let mut file = fs::File::create(branch.join(name)).unwrap();
                file.write_all(b"synced").unwrap();
                file.sync_all().unwrap();
            }
            switch.cut_after(Duration::ZERO);
            switch.wait();
            let after = after_power_cut(&disk, daemon, file_system);
            for name in ["new", "marker"] {
                let found = fs::read(after.branch("branch").join(name));
                assert_eq!(found.unwrap(), b"synced", "{name}, round {round}, {file_system:?}");
            }
            assert!(!after.store().join("lost").exists());
        }
    }
}
