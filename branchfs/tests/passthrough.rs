//! Passthrough: the kernel reads and writes files itself. Copy-up, mappings, attributes and commits work as without it. The
//! requests that the kernel does not send show that passthrough is used.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use common::mapping::{Mapping, PAGE_BYTES, Sharing};
use common::{Mount, assert_same, refusal, shell, snapshot};
use rustix::fs::FlockOperation;

/// From here on a file is big (semantics.md).
const BIG: usize = 16 << 20;

fn big_file(path: &Path, byte: u8) {
    fs::write(path, vec![byte; BIG]).unwrap();
}

#[test]
fn written_files_and_big_files_are_read_without_a_request() {
    let mount = Mount::over(|base| big_file(&base.join("big"), b'b'));
    let branch = mount.create("branch");
    let mut written = OpenOptions::new()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(branch.join("new"))
        .unwrap();
    for _ in 0..500 {
        written.write_all(b"line\n").unwrap();
    }
    let mut content = String::new();
    written.seek(SeekFrom::Start(0)).unwrap();
    written.read_to_string(&mut content).unwrap();
    assert_eq!(content, "line\n".repeat(500));
    assert_eq!(fs::read(branch.join("big")).unwrap(), vec![b'b'; BIG]);
    assert_eq!((mount.requests("write"), mount.requests("read")), (0, 0));
    assert_eq!(mount.ask("info")["passthrough"]["on"], true);
}

#[test]
fn without_passthrough_everything_works_and_the_reason_is_reported() {
    let mount = Mount::unmounted(|base| big_file(&base.join("big"), b'b'));
    mount.mount_with(&["--no-passthrough"]);
    let branch = mount.create("branch");
    fs::write(branch.join("new"), "new").unwrap();
    assert_eq!(fs::read(branch.join("big")).unwrap(), vec![b'b'; BIG]);
    assert!(mount.requests("write") > 0 && mount.requests("read") > 0);
    let feature = mount.ask("info")["passthrough"].clone();
    assert_eq!((&feature["on"], &feature["reason"]), (&false.into(), &"switched off".into()));
    mount.commit("branch");
    assert_eq!(fs::read_to_string(mount.base().join("new")).unwrap(), "new");
}

#[test]
fn a_small_file_is_read_without_a_request_and_its_attributes_stay_known() {
    let content: Vec<u8> = (0..20_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    let mount = Mount::over(|base| fs::write(base.join("small"), &content).unwrap());
    let path = mount.create("branch").join("small");
    assert_eq!(fs::read(&path).unwrap(), content);
    let asked = mount.requests("getattr");
    assert_eq!(fs::metadata(&path).unwrap().len(), 20_000);
    assert_eq!((mount.requests("read"), mount.requests("getattr")), (0, asked));
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all_at(b"changed", 10_000).unwrap();
    drop(writer);
    assert_eq!(&fs::read(&path).unwrap()[10_000..10_007], b"changed");
    assert_eq!(fs::read(mount.base().join("small")).unwrap(), content);
}

#[test]
fn a_write_is_read_while_others_open_the_file_for_the_first_time() {
    const FILES: usize = 300;
    let mount = Mount::over(|base| shell(base, "for i in {0..299}; do echo old > $i; done"));
    let branch = mount.create("branch");
    let each = |work: fn(&Path)| {
        for number in 0..FILES {
            work(&branch.join(number.to_string()));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| each(|path| drop(fs::read(path).unwrap())));
        }
        scope.spawn(|| {
            each(|path| {
                let writer = OpenOptions::new().write(true).open(path).unwrap();
                writer.write_all_at(b"new", 0).unwrap();
            });
        });
    });
    each(|path| assert_eq!(fs::read_to_string(path).unwrap(), "new\n", "{path:?}"));
}

#[test]
fn readers_of_a_small_file_continue_with_its_copy() {
    let mount = Mount::over(|base| fs::write(base.join("log"), "one\n").unwrap());
    let branch = mount.create("branch");
    let mut reader = File::open(branch.join("log")).unwrap();
    let mut line = [0; 4];
    reader.read_exact(&mut line).unwrap();
    shell(&branch, "echo two >> log");
    reader.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"two\n", "as tail -f needs it");
    assert_eq!(fs::read_to_string(mount.base().join("log")).unwrap(), "one\n");
}

#[test]
fn readers_of_a_big_file_keep_what_they_opened_and_the_base_is_never_written() {
    let mount = Mount::over(|base| big_file(&base.join("big"), b'b'));
    let branch = mount.create("branch");
    let path = branch.join("big");
    let (early, early_status) = (File::open(&path).unwrap(), fs::metadata(&path).unwrap());
    let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    writer.write_all_at(b"changed", 1 << 20).unwrap();
    let read = |file: &File| {
        let mut found = [0; 7];
        file.read_exact_at(&mut found, 1 << 20).unwrap();
        found
    };
    assert_eq!(&read(&early), b"bbbbbbb", "who opened it before keeps what it was");
    assert_eq!(&read(&writer), b"changed");
    assert_eq!(&read(&File::open(&path).unwrap()), b"changed");
    assert_eq!(fs::metadata(&path).unwrap().ino(), early_status.ino(), "it is the same file");
    assert_eq!(fs::read(mount.base().join("big")).unwrap(), vec![b'b'; BIG]);
    drop((early, writer));
    mount.commit("branch");
    assert_eq!(&fs::read(mount.base().join("big")).unwrap()[1 << 20..][..7], b"changed");
}

/// semantics.md names the size from which a reader keeps the file as it was, and says what else goes with that: a mapping
/// shows the same as the descriptor, and locks are those of another file.
#[test]
fn only_from_16_mib_on_a_reader_keeps_the_file_as_it_was() {
    let mount = Mount::over(|base| {
        big_file(&base.join("big"), b'o');
        fs::write(base.join("smaller"), vec![b'o'; BIG - 1]).unwrap();
    });
    let branch = mount.create("branch");
    for (name, is_kept) in [("big", true), ("smaller", false)] {
        let path = branch.join(name);
        let early = File::open(&path).unwrap();
        let mapping = Mapping::new(&early, PAGE_BYTES, Sharing::ReadOnly);
        assert_eq!(mapping.read()[0], b'o', "{name}");
        for byte in [b'1', b'2'] {
            let writer = OpenOptions::new().write(true).open(&path).unwrap();
            writer.write_all_at(&[byte], 0).unwrap();
            let wanted = if is_kept { b'o' } else { byte };
            let mut found = [0];
            early.read_exact_at(&mut found, 0).unwrap();
            assert_eq!((found[0], mapping.read()[0]), (wanted, wanted), "{name}");
            let mut late = [0];
            File::open(&path).unwrap().read_exact_at(&mut late, 0).unwrap();
            assert_eq!(late[0], byte, "{name}, opened after the change");
        }
        rustix::fs::flock(&early, FlockOperation::LockExclusive).unwrap();
        let late = File::open(&path).unwrap();
        let locked = rustix::fs::flock(&late, FlockOperation::NonBlockingLockExclusive);
        assert_eq!(locked.is_ok(), is_kept, "{name}: locks of its own");
    }
    assert_eq!(fs::read(mount.base().join("big")).unwrap()[0], b'o');
}

#[test]
fn attributes_of_a_big_file_change_under_its_readers() {
    let mount = Mount::over(|base| big_file(&base.join("big"), b'b'));
    let branch = mount.create("branch");
    let path = branch.join("big");
    let reader = File::open(&path).unwrap();
    reader.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(mount.base().join("big")).unwrap().mode() & 0o777, 0o644);
    let mut again = File::open(&path).unwrap();
    again.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    let mut content = Vec::new();
    again.read_to_end(&mut content).unwrap();
    assert!(content == vec![b'b'; BIG]);
}

#[test]
fn size_and_times_follow_what_the_kernel_writes() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let path = branch.join("file");
    let mut file = File::create(&path).unwrap();
    let mut before = fs::metadata(&path).unwrap();
    for step in 1..=20_u64 {
        file.write_all(&[b'x'; 100]).unwrap();
        let now = fs::metadata(&path).unwrap();
        assert_eq!(now.len(), step * 100);
        assert!((now.mtime(), now.mtime_nsec()) >= (before.mtime(), before.mtime_nsec()));
        before = now;
    }
    file.set_len(50).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 50);
    file.set_len(5000).unwrap();
    assert_eq!(fs::read(&path).unwrap()[40..60], [[b'x'; 10], [0; 10]].concat());
}

/// A Python program that maps `file` shared, closes it, writes "mapped" through the mapping when told, and waits.
const MAPPER: &str = r#"
import mmap, os, sys
descriptor = os.open("file", os.O_RDWR)
mapping = mmap.mmap(descriptor, 4096)
os.close(descriptor)
print("ready", flush=True)
for line in sys.stdin:
    mapping[0:6] = b"mapped"
    print("done", flush=True)
"#;

#[test]
fn a_write_through_a_mapping_is_seen_and_never_committed_in_part() {
    let mount = Mount::over(|base| fs::write(base.join("file"), vec![b'.'; 4096]).unwrap());
    let branch = mount.create("branch");
    fs::metadata(branch.join("file")).unwrap(); // the kernel has its attributes before it is mapped
    let mut mapper = Command::new("python3")
        .args(["-c", MAPPER])
        .current_dir(&branch)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let (mut told, answers) = (mapper.stdin.take().unwrap(), mapper.stdout.take().unwrap());
    let mut answers = std::io::BufRead::lines(std::io::BufReader::new(answers));
    assert_eq!(answers.next().unwrap().unwrap(), "ready");
    let before = fs::metadata(branch.join("file")).unwrap();
    told.write_all(b"write\n").unwrap();
    assert_eq!(answers.next().unwrap().unwrap(), "done");
    assert_eq!(&fs::read(branch.join("file")).unwrap()[..6], b"mapped");
    let after = fs::metadata(branch.join("file")).unwrap();
    assert!((after.mtime(), after.mtime_nsec()) > (before.mtime(), before.mtime_nsec()));
    let refused = refusal(&mount.run(&["commit", "branch"], &[]));
    assert!(refused.contains("\n  file\n"), "{refused}");
    drop(told);
    mapper.wait().unwrap();
    mount.commit("branch");
    assert_eq!(&fs::read(mount.base().join("file")).unwrap()[..6], b"mapped");
}

#[test]
fn a_branch_is_not_forked_while_the_kernel_writes_there() {
    let mount = Mount::new();
    let parent = mount.create("parent");
    let mut writer = File::create(parent.join("log")).unwrap();
    writer.write_all(b"one\n").unwrap();
    let refused = refusal(&mount.run(&["create", "--parent", "parent", "child"], &[]));
    assert!(refused.contains("cannot be forked") && refused.contains("\n  log\n"), "{refused}");
    writer.write_all(b"two\n").unwrap();
    fs::write(parent.join("other"), "not frozen").unwrap();
    drop(writer);
    let child = mount.create_below("parent", "child");
    assert_eq!(fs::read_to_string(child.join("log")).unwrap(), "one\ntwo\n");
}

#[test]
fn writing_takes_set_id_bits_away() {
    let mount = Mount::over(|base| {
        fs::write(base.join("tool"), "tool").unwrap();
        fs::set_permissions(base.join("tool"), fs::Permissions::from_mode(0o6777)).unwrap();
    });
    fs::set_permissions(mount.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let branch = mount.create("branch");
    let written = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-c", "echo x >> tool"])
        .current_dir(&branch)
        .status()
        .unwrap();
    assert!(written.success());
    assert_eq!(fs::metadata(branch.join("tool")).unwrap().mode() & 0o7777, 0o777);
}

/// Changes the content of one file in each way that takes rights away, and prints what each file has left.
const CONTENT_CHANGES: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
user = int(sys.argv[1])
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
def allocate(mode):
    def change(name):
        assert libc.fallocate(os.open(name, os.O_RDWR), mode, 0, 4096) == 0, os.strerror(ctypes.get_errno())
    return change
def copy(name):
    source = os.open("source", os.O_RDONLY)
    assert os.copy_file_range(source, os.open(name, os.O_RDWR), 10) == 10
KEEP_SIZE, PUNCH, ZERO = 1, 3, 16
changes = [
    lambda name: os.write(os.open(name, os.O_WRONLY), b"x"),
    lambda name: os.truncate(name, 5000),
    lambda name: os.ftruncate(os.open(name, os.O_RDWR), 3000),
    lambda name: os.open(name, os.O_WRONLY | os.O_TRUNC),
    allocate(0), allocate(KEEP_SIZE), allocate(PUNCH), allocate(ZERO), copy,
]
for number, change in enumerate(changes):
    name = f"tool-{number}"
    change(name)
    print(oct(os.stat(name).st_mode & 0o7777), "security.capability" in os.listxattr(name))
"#;

#[test]
fn every_change_of_content_takes_the_rights_away_that_it_takes_on_ext4() {
    let fill = |root: &Path| {
        // `cap_net_raw+ep`, in the form of version 2.
        let capability: Vec<u8> =
            [0x0200_0001_u32, 1 << 13, 0, 0, 0].into_iter().flat_map(u32::to_le_bytes).collect();
        for number in 0..9 {
            let path = root.join(format!("tool-{number}"));
            fs::write(&path, [0; 8192]).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&path, "security.capability", &capability, flags).unwrap();
        }
        fs::write(root.join("source"), [1; 8192]).unwrap();
    };
    let change = |directory: &Path, user: u32| {
        let words = ["-c", CONTENT_CHANGES, &user.to_string()];
        let done = Command::new("python3").args(words).current_dir(directory).output().unwrap();
        common::succeed(&done);
        String::from_utf8(done.stdout).unwrap()
    };
    for user in [65534, 0] {
        let native = tempfile::tempdir().unwrap();
        fs::set_permissions(native.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fill(native.path());
        let wanted = change(native.path(), user);
        for options in [&[][..], &["--no-passthrough"]] {
            let mount = Mount::with(options, fill);
            let public = fs::Permissions::from_mode(0o755);
            fs::set_permissions(mount.directory.path(), public).unwrap();
            let branch = mount.create("branch");
            assert_eq!(change(&branch, user), wanted, "user {user}, {options:?}");
        }
    }
}

#[test]
fn a_file_can_be_opened_in_every_order() {
    let mount = Mount::over(|base| {
        fs::write(base.join("small"), "small").unwrap();
        big_file(&base.join("big"), b'b');
    });
    let branch = mount.create("branch");
    for name in ["small", "big", "new"] {
        let path = branch.join(name);
        let modes: [fn(&Path) -> std::io::Result<File>; 4] = [
            |path| File::open(path),
            |path| OpenOptions::new().append(true).open(path),
            |path| OpenOptions::new().read(true).write(true).open(path),
            |path| OpenOptions::new().write(true).create(true).truncate(true).open(path),
        ];
        for first in modes {
            for second in modes {
                for third in modes {
                    if !path.exists() {
                        fs::write(&path, "new").unwrap();
                    }
                    let files = [first(&path).unwrap(), second(&path).unwrap()];
                    let late = third(&path).unwrap();
                    drop(files);
                    second(&path).unwrap();
                    drop(late);
                }
            }
        }
    }
    // The base is what it was.
    assert_eq!(fs::read_to_string(mount.base().join("small")).unwrap(), "small");
    assert_eq!(fs::read(mount.base().join("big")).unwrap(), vec![b'b'; BIG]);
}

#[test]
fn an_open_file_outlives_its_name() {
    let mount = Mount::over(|base| {
        fs::write(base.join("small"), "small").unwrap();
        big_file(&base.join("big"), b'b');
    });
    let branch = mount.create("branch");
    for name in ["small", "big", "new"] {
        let path = branch.join(name);
        if name == "new" {
            fs::write(&path, "new").unwrap();
        }
        let mut reader = File::open(&path).unwrap();
        let mut writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        writer.write_all(b"late!").unwrap();
        writer.seek(SeekFrom::Start(0)).unwrap();
        let mut content = Vec::new();
        writer.read_to_end(&mut content).unwrap();
        assert_eq!(&content[..5], b"late!", "{name}");
        let mut first = [0; 3];
        reader.read_exact(&mut first).unwrap();
        assert_eq!(&first, if name == "big" { b"bbb" } else { b"lat" }, "{name}");
        assert_eq!(writer.metadata().unwrap().nlink(), 0, "{name}");
        fs::write(&path, "another").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "another");
    }
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "after the commit");
}

#[test]
fn a_running_program_cannot_be_truncated() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let program = branch.join("program");
    fs::copy("/bin/sleep", &program).unwrap();
    let mut running = Command::new(&program).arg("60").spawn().unwrap();
    let truncated = |access: rustix::fs::OFlags| {
        let flags = access | rustix::fs::OFlags::TRUNC;
        rustix::fs::open(&program, flags, rustix::fs::Mode::empty()).unwrap_err()
    };
    for access in [rustix::fs::OFlags::RDONLY, rustix::fs::OFlags::WRONLY] {
        assert_eq!(truncated(access), rustix::io::Errno::TXTBSY);
    }
    assert!(fs::metadata(&program).unwrap().len() > 0);
    running.kill().unwrap();
    running.wait().unwrap();
}

/// Prints the errno of each operation that a branch does not have.
const MISSING: &str = r#"
import array, ctypes, errno, fcntl, os
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
file = os.open("file", os.O_RDWR)
for mode in (8, 32):
    assert libc.fallocate(file, mode, 0, 4096) == -1
    print(errno.errorcode[ctypes.get_errno()])
for number, size in ((0xC020660B, 32), (0x80086601, 8)):
    try:
        fcntl.ioctl(file, number, array.array("B", bytes(size)))
        print("done")
    except OSError as error:
        print(errno.errorcode[error.errno])
"#;

#[test]
fn operations_that_a_branch_lacks_fail_as_the_table_of_differences_says() {
    let mount = Mount::over(|base| fs::write(base.join("file"), [1; 8192]).unwrap());
    let branch = mount.create("branch");
    let words = ["-c", MISSING];
    let done = Command::new("python3").args(words).current_dir(&branch).output().unwrap();
    common::succeed(&done);
    let printed = String::from_utf8(done.stdout).unwrap();
    assert_eq!(printed, "ENOTSUP\nENOTSUP\nENOTSUP\nENOTTY\n", "as Python calls EOPNOTSUPP");
    shell(&branch, "test $(stat -c %W file) = 0");
}

#[test]
fn without_passthrough_readers_of_a_big_file_continue_with_its_copy() {
    let mount = Mount::unmounted(|base| fs::write(base.join("log"), vec![b'l'; 1 << 20]).unwrap());
    let mount = mount.with_big_files_from(1 << 19);
    mount.mount_with(&["--no-passthrough"]);
    let branch = mount.create("branch");
    let mut reader = File::open(branch.join("log")).unwrap();
    let mut content = Vec::new();
    reader.read_to_end(&mut content).unwrap();
    let writer = OpenOptions::new().write(true).open(branch.join("log")).unwrap();
    writer.write_all_at(b"first", 5000).unwrap();
    shell(&branch, "printf end >> log");
    content.clear();
    reader.read_to_end(&mut content).unwrap();
    assert_eq!(content, b"end", "as tail -f needs it");
    let mut found = [0; 5];
    reader.read_exact_at(&mut found, 5000).unwrap();
    assert_eq!(&found, b"first", "as SQLite needs it");
}
