//! The disk limit of a branch, on a real mount: what is counted, which writes fail, and that the limit survives a remount.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use common::{Mount, refusal, shell, succeed};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use serde_json::{Value, json};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn create(mount: &Mount, name: &str, limit: u64) -> PathBuf {
    succeed(&mount.run(&["create", "--disk-limit", &limit.to_string(), name], &[]));
    mount.branch(name)
}

fn ask(mount: &Mount, request: &Value) -> Value {
    let mut path = [0; 4096];
    let length =
        rustix::fs::getxattr(mount.mountpoint(), "user.branchfs.control", &mut path[..]).unwrap();
    let mut stream = UnixStream::connect(OsStr::from_bytes(&path[..length])).unwrap();
    stream.write_all(format!("{request}\n").as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

fn branch(mount: &Mount, name: &str) -> Value {
    let reply = ask(mount, &json!({ "v": 1, "verb": "list" }));
    let branches = reply["ok"]["branches"].as_array().unwrap();
    branches.iter().find(|branch| branch["name"] == name).unwrap().clone()
}

fn used(mount: &Mount, name: &str) -> u64 {
    branch(mount, name)["disk_used"].as_u64().unwrap()
}

/// The last close of a file is told to the daemon after the caller goes on.
fn until_used(mount: &Mount, name: &str, bytes: u64) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while used(mount, name) != bytes {
        assert!(
            std::time::Instant::now() < deadline,
            "{} bytes are counted, not {bytes}",
            used(mount, name)
        );
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

fn is_over<T: std::fmt::Debug>(outcome: std::io::Result<T>) {
    assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EDQUOT));
}

/// Writes until it is refused; returns how much went in.
fn fill(path: &Path) -> u64 {
    let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
    let block = [7; 4096];
    for _ in 0..10_000 {
        if let Err(error) = file.write_all(&block) {
            assert_eq!(error.raw_os_error(), Some(libc::EDQUOT), "{error}");
            return file.metadata().unwrap().len();
        }
    }
    panic!("nothing stopped it");
}

fn zeros(bytes: u64) -> Vec<u8> {
    vec![0; usize::try_from(bytes).unwrap()]
}

#[test]
fn a_full_branch_stops_its_writers_only() {
    let mount = Mount::new();
    let (full, other) = (create(&mount, "full", MIB), mount.create("other"));
    assert_eq!(fill(&full.join("file")), MIB, "all of the limit can be used");
    is_over(fs::write(full.join("more"), "x"));
    assert_eq!(used(&mount, "full"), MIB);
    assert_eq!(branch(&mount, "full")["disk_limit"], MIB);
    assert_eq!(branch(&mount, "full")["disk_refusals"], 2);
    fs::write(other.join("file"), zeros(3 * MIB)).unwrap();
    assert_eq!(branch(&mount, "other")["disk_limit"], Value::Null);
    assert_eq!(branch(&mount, "other")["disk_used"], Value::Null);
    fs::write(full.join("file"), "less").unwrap();
    fs::write(full.join("more"), "fits now").unwrap();
    mount.commit("full");
    assert_eq!(fs::read_to_string(mount.base().join("more")).unwrap(), "fits now");
}

#[test]
fn overwriting_costs_nothing_and_what_goes_is_given_back() {
    let mount = Mount::new();
    let branch = create(&mount, "branch", MIB);
    for _ in 0..5 {
        let file = File::create(branch.join("temporary")).unwrap();
        for _ in 0..3 {
            file.write_all_at(&zeros(700 * KIB), 0).unwrap();
        }
        drop(file);
        fs::remove_file(branch.join("temporary")).unwrap();
        until_used(&mount, "branch", 0);
    }
    for _ in 0..5 {
        fs::write(branch.join("draft"), zeros(500 * KIB)).unwrap();
        fs::rename(branch.join("draft"), branch.join("final")).unwrap();
        until_used(&mount, "branch", 500 * KIB);
    }
    until_used(&mount, "branch", 500 * KIB);
}

#[test]
fn a_copy_up_counts_what_it_copies() {
    let mount = Mount::over(|base| {
        fs::write(base.join("big"), zeros(MIB)).unwrap();
        fs::write(base.join("small"), zeros(100 * KIB)).unwrap();
        File::create(base.join("hole")).unwrap().set_len(1 << 40).unwrap();
    });
    let branch = create(&mount, "branch", 512 * KIB);
    is_over(OpenOptions::new().append(true).open(branch.join("big")));
    assert_eq!(used(&mount, "branch"), 0, "a refused copy costs nothing");
    assert_eq!(fs::read(branch.join("big")).unwrap().len() as u64, MIB, "reading goes on");
    fs::remove_file(branch.join("big")).unwrap();
    let mut small = OpenOptions::new().append(true).open(branch.join("small")).unwrap();
    assert_eq!(used(&mount, "branch"), 100 * KIB);
    small.write_all(&zeros(10 * KIB)).unwrap();
    drop(small);
    let hole = OpenOptions::new().write(true).open(branch.join("hole")).unwrap();
    assert_eq!(used(&mount, "branch"), 112 * KIB, "holes are not copied");
    hole.write_all_at(b"x", 1 << 39).unwrap();
    assert_eq!(used(&mount, "branch"), 116 * KIB);
}

#[test]
fn emptying_a_file_needs_no_copy() {
    let mount = Mount::over(|base| {
        fs::write(base.join("one"), zeros(MIB)).unwrap();
        fs::write(base.join("two"), zeros(MIB)).unwrap();
    });
    let branch = create(&mount, "branch", 64 * KIB);
    fs::write(branch.join("one"), "short").unwrap();
    let two = branch.join("two");
    rustix::fs::open(&two, OFlags::TRUNC, Mode::empty()).unwrap();
    assert_eq!(fs::metadata(two).unwrap().len(), 0);
}

#[test]
fn a_file_without_a_name_counts_as_long_as_it_is_open() {
    let mount = Mount::new();
    let branch = create(&mount, "branch", MIB);
    fs::write(branch.join("file"), zeros(MIB)).unwrap();
    let mut reader = File::open(branch.join("file")).unwrap();
    fs::remove_file(branch.join("file")).unwrap();
    is_over(fs::write(branch.join("other"), "x"));
    reader.read_exact(&mut [0; 10]).unwrap();
    drop(reader);
    until_used(&mount, "branch", 0);
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let unnamed = rustix::fs::open(&branch, flags, Mode::from_raw_mode(0o600)).unwrap();
    let mut unnamed = File::from(unnamed);
    unnamed.write_all(&zeros(MIB)).unwrap();
    is_over(unnamed.write_all(b"x"));
    let through = format!("/proc/self/fd/{}", unnamed.as_raw_fd());
    rustix::fs::linkat(CWD, through, CWD, branch.join("named"), AtFlags::SYMLINK_FOLLOW).unwrap();
    drop(unnamed);
    assert_eq!(used(&mount, "branch"), MIB);
    fs::remove_file(branch.join("named")).unwrap();
    until_used(&mount, "branch", 0);
}

#[test]
fn every_way_to_add_bytes_is_counted() {
    let mount = Mount::over(|base| fs::write(base.join("source"), zeros(MIB)).unwrap());
    let branch = create(&mount, "branch", 256 * KIB);
    shell(
        &branch,
        "python3 -c '
import errno, mmap, os

def refused(what):
    try:
        what()
    except OSError as error:
        assert error.errno in (errno.EDQUOT, errno.EIO), error
    else:
        raise SystemExit(f\"{what} went through\")

file = os.open(\"file\", os.O_RDWR | os.O_CREAT)
refused(lambda: os.posix_fallocate(file, 0, 1 << 20))
def scatter():
    for place in range(1000):
        os.pwrite(file, bytes(1 << 14), place << 20)
refused(scatter)
os.ftruncate(file, 0)
source = os.open(\"source\", os.O_RDONLY)
copied = 0
def copy():
    global copied
    for _ in range(100):
        copied += os.copy_file_range(source, file, 1 << 16, copied, copied)
refused(copy)
assert copied <= 1 << 18, copied
os.ftruncate(file, 0)
os.ftruncate(file, 1 << 20)
mapped = mmap.mmap(file, 1 << 20)
mapped[:] = bytes([1]) * (1 << 20)
refused(mapped.flush)
mapped.close()
'",
    );
    let on_disk = fs::metadata(branch.join("file")).unwrap().blocks() * 512;
    assert!(on_disk <= 256 * KIB, "{on_disk}");
}

#[test]
fn a_flood_of_names_has_an_end() {
    let mount = Mount::new();
    let branch = create(&mount, "branch", 64 * KIB);
    let made = (0..10_000).take_while(|n| File::create(branch.join(n.to_string())).is_ok()).count();
    assert_eq!(made, 128);
    is_over(fs::create_dir(branch.join("directory")));
    is_over(fs::hard_link(branch.join("1"), branch.join("link")));
    fs::remove_file(branch.join("0")).unwrap();
    std::os::unix::fs::symlink("1", branch.join("link")).unwrap();
    fs::write(branch.join("1"), zeros(64 * KIB)).unwrap();
}

#[test]
fn bytes_added_by_a_child_count_for_its_parent() {
    let mount = Mount::new();
    create(&mount, "parent", MIB);
    let child = mount.create_below("parent", "child");
    assert_eq!(fill(&child.join("file")), MIB, "a child has no more than its parent");
    mount.abort("child");
    until_used(&mount, "parent", 0);
    let args = ["create", "--parent", "parent", "--disk-limit", "102400", "small"];
    succeed(&mount.run(&args, &[]));
    assert_eq!(fill(&mount.branch("small").join("file")), 100 * KIB);
    mount.commit("small");
    assert_eq!(used(&mount, "parent"), 100 * KIB);
    let parent = mount.branch("parent");
    fs::write(parent.join("more"), zeros(500 * KIB)).unwrap();
    assert_eq!(fill(&parent.join("rest")), MIB - 600 * KIB, "its own limit, not its child's");
}

#[test]
fn the_limit_and_what_was_used_survive_the_daemon() {
    let mount = Mount::over(|base| fs::write(base.join("seed"), zeros(64 * KIB)).unwrap());
    create(&mount, "parent", MIB);
    let child = mount.create_below("parent", "child");
    fs::write(child.join("file"), zeros(200 * KIB)).unwrap();
    OpenOptions::new().append(true).open(child.join("seed")).unwrap().write_all(b"x").unwrap();
    mount.commit("child");
    let child = mount.create_below("parent", "child");
    fs::write(child.join("other"), zeros(100 * KIB)).unwrap();
    rustix::fs::syncfs(File::open(mount.base()).unwrap()).unwrap();
    let before = used(&mount, "parent");
    assert_eq!(before, (200 + 68 + 100) * KIB);
    mount.kill();
    mount.mount();
    assert_eq!(branch(&mount, "parent")["disk_limit"], MIB);
    assert_eq!(used(&mount, "parent"), before);
    assert_eq!(used(&mount, "child"), 100 * KIB);
    fs::write(child.join("other"), zeros(100 * KIB)).unwrap();
    assert_eq!(fill(&child.join("rest")), MIB - before);
    fs::remove_file(child.join("file")).unwrap();
    is_over(fs::write(child.join("no"), "x"));
}

#[test]
fn real_work_is_counted_as_a_restart_finds_it() {
    let mount = Mount::over(|base| {
        shell(base, "mkdir -p tree/sub; for n in $(seq 60); do seq $((n * 40)) >tree/sub/$n; done");
        shell(base, "ln tree/sub/1 tree/one; ln tree/sub/2 tree/two; git init -q .");
    });
    let branch = create(&mount, "branch", 200 * MIB);
    shell(
        &branch,
        "git config user.email a@b; git config user.name n; git add -A; git commit -qm one
        cp -a tree copy; mv copy/sub copy/moved; rm -r tree/sub; ln copy/moved/3 copy/three
        for n in $(seq 5 40); do echo more >>copy/moved/$n; truncate -s $((n * 100)) copy/moved/$n; done
        dd if=/dev/zero of=sparse bs=4k count=1 seek=1000 status=none; echo x >>tree/one
        fallocate -l 100k copy/aside; fallocate -p -o 4096 -l 8192 copy/moved/40
        tar cf all.tar copy; gzip all.tar; sed -i s/1/2/ copy/moved/4*; rm copy/moved/2?; git gc -q
        mv -f copy/moved/31 copy/moved/32; rm copy/moved/3; echo y >copy/three",
    );
    rustix::fs::syncfs(File::open(mount.base()).unwrap()).unwrap();
    let before = used(&mount, "branch");
    mount.unmount();
    mount.mount();
    let after = used(&mount, "branch");
    // Of a file in many pieces the file system's own list of them takes a block or two.
    assert!(before.abs_diff(after) <= 16 * KIB, "counted {before}, found {after}");
    shell(&branch, "rm -rf copy all.tar.gz sparse .git tree");
    // The copy of a file with several names is kept as long as the branch, for the names not seen yet.
    until_used(&mount, "branch", 4 * KIB);
}

#[test]
fn the_branch_shows_its_limit_as_its_size() {
    let mount = Mount::new();
    let branch = create(&mount, "branch", 10 * MIB);
    fs::write(branch.join("file"), zeros(4 * MIB)).unwrap();
    let size = rustix::fs::statvfs(&branch).unwrap();
    assert_eq!(size.f_blocks * size.f_frsize, 10 * MIB);
    assert_eq!(size.f_bavail * size.f_frsize, 6 * MIB);
}

#[test]
fn a_limit_is_a_number_above_zero() {
    let mount = Mount::new();
    refusal(&mount.run(&["create", "--disk-limit", "0", "branch"], &[]));
    let request = json!({ "v": 1, "verb": "create", "name": "branch", "disk_limit": 0 });
    assert_eq!(ask(&mount, &request)["error"]["kind"], "usage");
    for wrong in [json!(-1), json!("1M"), json!(1.5)] {
        let request = json!({ "v": 1, "verb": "create", "name": "branch", "disk_limit": wrong });
        assert_eq!(ask(&mount, &request)["error"]["kind"], "usage", "{wrong}");
    }
    let info = ask(&mount, &json!({ "v": 1, "verb": "info" }));
    assert!(info["ok"]["features"].as_array().unwrap().contains(&json!("disk_limit")));
}
