//! A base on a small file system of its own, made for one test: the kinds that work, those that do not, and full ones.

use std::fs;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::recorder::Recorder;
use super::{Mount, shell};

/// A base on a file system of its own, not mounted by us yet. Both mounts go at the end.
pub struct Disk {
    recorder: Option<Recorder>,
    mount: Mount,
}

impl Deref for Disk {
    type Target = Mount;

    fn deref(&self) -> &Mount {
        &self.mount
    }
}

impl Disk {
    /// A loop device of `size` (as `truncate` takes it) on which `make` makes a file system.
    pub fn image(size: &str, make: &str) -> Self {
        Self::mounted(&format!(
            "truncate -s {size} image; {make} image > /dev/null; mount -o loop image base; rmdir base/lost+found 2>/dev/null || true"
        ))
    }

    /// Whatever `script` mounts at `base`; it runs beside it.
    pub fn mounted(script: &str) -> Self {
        let mount = Mount::unmounted(|_| ());
        let disk = Self { recorder: None, mount };
        shell(disk.directory.path(), script);
        disk
    }

    /// A loop device whose writes are recorded, with the file system in the image that `make` leaves.
    pub fn recorded(make: &str) -> Self {
        let mut disk = Self::mounted(make);
        let directory = disk.directory.path().to_path_buf();
        disk.recorder = Some(Recorder::new(&directory));
        shell(&directory, "mount -o loop device base");
        disk
    }

    pub fn recorder(&self) -> &Recorder {
        self.recorder.as_ref().unwrap()
    }

    /// Ends the file system: what is not on the device yet is written to it. Nothing uses it when this returns.
    pub fn detach(&self) {
        let unmount = || rustix::mount::unmount(self.base(), rustix::mount::UnmountFlags::empty());
        super::wait_until("the base is not in use", || unmount().is_ok()); // the guard ends after the daemon
        super::wait_until("the file system ends", || !self.is_attached());
    }

    /// Whether a loop device has the image. It has it for a moment after the unmount: the overlayfs of a branch, which ends
    /// in the background, has a mount of its own. If a copy of the image is mounted then, btrfs gives the copy another UUID:
    /// that is not what a machine finds after a power cut.
    fn is_attached(&self) -> bool {
        let files = ["image", "device"].map(|name| self.directory.path().join(name));
        let devices = fs::read_dir("/sys/block").unwrap().map(|device| device.unwrap().path());
        let mut backing =
            devices.filter_map(|device| fs::read_to_string(device.join("loop/backing_file")).ok());
        backing.any(|file| files.iter().any(|one| one == Path::new(file.trim_end())))
    }

    /// Whether what is mounted has the UUID that is in the image. A btrfs has another one while a copy of it is mounted.
    pub fn has_own_uuid(&self) -> bool {
        let Some(uuid) = btrfs_uuid(&self.directory.path().join("image")) else { return true };
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let base = self.base();
        let mut mounts = table.lines().rev().map(|line| line.split(' ').collect::<Vec<_>>());
        let found = mounts.find(|words| Path::new(words[4]) == base);
        let device = found.and_then(|words| Path::new(words[words.len() - 2]).file_name());
        device.is_some_and(|device| kernel_has(&uuid).join("devices").join(device).exists())
    }

    /// As [`Mount::with_big_files_from`].
    pub fn with_big_files_from(mut self, bytes: u64) -> Self {
        self.mount.big_file_bytes = Some(bytes);
        self
    }

    /// Bytes that are free: also those that ext4 keeps for root.
    pub fn free(&self) -> u64 {
        rustix::fs::statvfs(self.base()).map(|found| found.f_bfree * found.f_frsize).unwrap()
    }

    /// Takes all room that can be had, and gives `left` bytes of it back. (A file system may keep some for itself.)
    pub fn fill(&self, left: u64) -> PathBuf {
        let filler = self.base().join(".branching/filler");
        let file = fs::File::create(&filler).unwrap();
        let (mut taken, mut piece) = (0, self.free().next_power_of_two());
        while piece >= 512 {
            match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), taken, piece) {
                Ok(()) => taken += piece,
                Err(_) => piece /= 2,
            }
        }
        file.set_len(taken.saturating_sub(left)).unwrap();
        file.sync_all().unwrap();
        filler
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        const ENDING_MAX: Duration = Duration::from_secs(300);
        let _ = Command::new(super::PROGRAM).arg("unmount").arg(self.mountpoint()).output();
        let _ = rustix::mount::unmount(self.mountpoint(), rustix::mount::UnmountFlags::DETACH);
        let _ = rustix::mount::unmount(self.base(), rustix::mount::UnmountFlags::DETACH);
        let start = Instant::now();
        while self.is_attached() && start.elapsed() < ENDING_MAX {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The UUID of a btrfs in an image, as the kernel writes it.
fn btrfs_uuid(image: &Path) -> Option<String> {
    const SUPERBLOCK: u64 = 64 << 10;
    let mut block = [0; 0x48];
    fs::File::open(image).ok()?.read_exact_at(&mut block, SUPERBLOCK).ok()?;
    let digits: String = block[0x20..0x30].iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
    (&block[0x40..] == b"_BHRfS_M").then(|| parts.join("-"))
}

/// There while a btrfs of this UUID is mounted.
fn kernel_has(uuid: &str) -> PathBuf {
    Path::new("/sys/fs/btrfs").join(uuid)
}

/// Runs the program with a system call that fails as on a kernel or file system without it: `rule` is a line of Python
/// that says which, over `number` and `arguments`.
pub fn lacking(script: &Path, call: &str, argument: u32, flag: u32, errno: i32) -> Command {
    fs::write(script, LACKING).unwrap();
    let mut command = Command::new("python3");
    command.arg(script).args([call, &argument.to_string(), &flag.to_string(), &errno.to_string()]);
    command.arg(super::PROGRAM);
    command
}

/// A seccomp filter: `CALL ARGUMENT FLAG ERRNO PROGRAM…`; the call fails where that argument has one of the flag's bits
/// (flag 0: always).
const LACKING: &str = r#"
import ctypes, os, struct, sys
call, argument, flag, errno = sys.argv[1], *map(int, sys.argv[2:5])
machine = os.uname().machine
numbers = {
    'x86_64': {'renameat2': 316, 'mknodat': 259, 'linkat': 265, 'openat2': 437, 'syncfs': 306},
    'aarch64': {'renameat2': 276, 'mknodat': 33, 'linkat': 37, 'openat2': 437, 'syncfs': 267},
}[machine]
LOAD, EQUAL, BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, ERRNO = 0x7fff0000, 0x00050000
program = [(LOAD, 0, 0, 0), (EQUAL, 0, 3 if flag else 1, numbers[call])]
if flag:
    program += [(LOAD, 0, 0, 16 + 8 * argument), (BITS, 0, 1, flag)]
program += [(RETURN, 0, 0, ERRNO | errno), (RETURN, 0, 0, ALLOW)]
code = b''.join(struct.pack('=HBBI', *step) for step in program)
buffer = ctypes.create_string_buffer(code)
class Filter(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('steps', ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
rules = Filter(len(program), ctypes.cast(buffer, ctypes.c_void_p))
assert libc.prctl(SECCOMP, FILTER, ctypes.byref(rules), 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[5], sys.argv[5:])
"#;
