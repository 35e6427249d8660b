//! A disk that records its writes and flushes, and shows what a power cut at any moment may have left of them.
//!
//! A file system on a loop device sends each block that it writes to the device's file, and a sync at each barrier. That file is
//! served through FUSE by a process that notes both in order. A disk may keep, of all that was written since the last barrier,
//! any part: blocks of any order, and a write cut off at a sector. Whatever was written before the barrier is there.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::work::Random;

/// What a disk writes whole or not at all, even as it loses power: its physical sector. Most disks today have sectors of
/// 4 KiB, also those that show sectors of 512 bytes. All three file systems need that, or cannot be mounted whatever is on
/// them, since they overwrite in place what has one checksum and no other copy that a mount reads: ext4 the superblock of
/// its journal (1 KiB), xfs its blocks (recovery trusts the header of a block that is newer than the log), btrfs its
/// superblock (4 KiB).
const SECTOR_BYTES: u64 = 4096;

/// `IMAGE LOG DEVICE`: shows the image at `DEVICE` as a file that can be written. A record of the log is the offset and length of
/// a write, and its content; a length of 0 is a flush.
const SERVER: &str = r#"
import ctypes, os, stat, struct, sys
image, log, device = sys.argv[1:4]
FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH, INIT, INTERRUPT, DESTROY, BATCH_FORGET = (
    2, 3, 4, 14, 15, 16, 18, 20, 25, 26, 36, 38, 42)
BIG_WRITES, MAX_PAGES, NOT_IMPLEMENTED, LARGEST = 1 << 5, 1 << 22, -38, 1 << 20
disk, writes, fuse = os.open(image, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_CREAT), os.open('/dev/fuse', os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f'fd={fuse},rootmode=100600,user_id=0,group_id=0,max_read={LARGEST}'
done = libc.mount(b'recorder', os.fsencode(device), b'fuse', 0, options.encode())
assert done == 0, os.strerror(ctypes.get_errno())
size = os.fstat(disk).st_size
attributes = struct.pack('=QII6Q10I', 3600, 0, 0, 1, size, size // 512, *[0] * 6, stat.S_IFREG | 0o600, 1, 0, 0, 0, 4096, 0)
started = struct.pack('=4I2H2I2H8I', 7, 31, LARGEST, BIG_WRITES | MAX_PAGES, 16, 12, LARGEST, 1, LARGEST // 4096, *[0] * 9)
answers = {INIT: started, GETATTR: attributes, SETATTR: attributes, OPEN: bytes(16), RELEASE: b'', FLUSH: b'', DESTROY: b''}
print('ready', flush=True)
while True:
    try:
        request = os.read(fuse, LARGEST + 8192)
    except OSError:
        break  # unmounted
    _, kind, number = struct.unpack_from('=IIQ', request)
    error, answer = (0, answers[kind]) if kind in answers else (NOT_IMPLEMENTED, b'')
    if kind in (FORGET, INTERRUPT, BATCH_FORGET):
        continue
    if kind in (READ, WRITE):
        offset, length = struct.unpack_from('=QI', request, 48)
    if kind == READ:
        error, answer = 0, os.pread(disk, length, offset)
    elif kind == WRITE:
        data = request[-length:]
        os.pwrite(disk, data, offset)
        os.write(writes, struct.pack('=QQ', offset, length) + data)
        error, answer = 0, struct.pack('=II', length, 0)
    elif kind == FSYNC:
        os.write(writes, struct.pack('=QQ', 0, 0))
        error, answer = 0, b''
    os.write(fuse, struct.pack('=IiQ', 16 + len(answer), error, number) + answer)
"#;

enum Record {
    Write { offset: u64, data: Vec<u8> },
    Flush,
}

/// The records of a disk since it was attached, and the image that it began with.
pub struct Recording {
    before: PathBuf,
    records: Vec<Record>,
    /// End of each record in the log.
    ends: Vec<u64>,
}

/// The process that serves the device.
pub struct Recorder {
    directory: PathBuf,
    server: Child,
}

impl Recorder {
    /// Serves the file `image` of a directory as the file `device` beside it.
    pub fn new(directory: &Path) -> Self {
        super::shell(directory, "cp --sparse=always image before; touch device");
        let mut command = Command::new("python3");
        command.args(["-c", SERVER, "image", "log", "device"]).current_dir(directory);
        let mut server = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { directory: directory.to_path_buf(), server }
    }

    /// A moment: all that was recorded before it has happened.
    pub fn now(&self) -> u64 {
        fs::metadata(self.directory.join("log")).map_or(0, |log| log.len())
    }

    pub fn recording(&self) -> Recording {
        let bytes = fs::read(self.directory.join("log")).unwrap();
        let (mut records, mut ends, mut at) = (Vec::new(), Vec::new(), 0);
        let number = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        while at < bytes.len() {
            let (offset, length) = (number(at), usize::try_from(number(at + 8)).unwrap());
            let data = bytes[at + 16..at + 16 + length].to_vec();
            at += 16 + length;
            records.push(if length == 0 { Record::Flush } else { Record::Write { offset, data } });
            ends.push(at as u64);
        }
        Recording { before: self.directory.join("before"), records, ends }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        const DETACHING_MAX: Duration = Duration::from_secs(10);
        let device = self.directory.join("device");
        let _ = rustix::mount::unmount(device, rustix::mount::UnmountFlags::DETACH);
        // It ends when the loop device has let go of the file, a moment after its file system was unmounted.
        let start = Instant::now();
        while matches!(self.server.try_wait(), Ok(None)) && start.elapsed() < DETACHING_MAX {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Recording {
    /// How many records there are that end at this moment or before.
    pub fn until(&self, moment: u64) -> usize {
        self.ends.iter().filter(|end| **end <= moment).count()
    }

    /// Whether all that happened before this moment is among the first `count` records.
    pub fn has(&self, count: usize, moment: u64) -> bool {
        count.checked_sub(1).map_or(0, |last| self.ends[last]) >= moment
    }

    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// What a power cut after the first `count` records may leave, as a file system image at `to`: of the writes after the last
    /// flush each is there, lost or torn, at random.
    pub fn cut(&self, count: usize, random: &mut Random, to: &Path) {
        let losses = random.below(4); // none, some, half, all of them
        self.write(count, to, |offset, bytes| match random.below(12) {
            _ if losses == 0 => bytes,
            _ if losses == 3 => 0,
            0 => torn(offset, random.below(bytes + 1)),
            drawn if drawn < 3 * losses => 0,
            _ => bytes,
        });
    }

    /// The same where all writes after the last flush are lost.
    pub fn cut_to_flushed(&self, count: usize, to: &Path) {
        self.write(count, to, |_, _| 0);
    }

    /// `keep` says how much is there of a write, by its offset and length.
    fn write(&self, count: usize, to: &Path, mut keep: impl FnMut(u64, usize) -> usize) {
        let script = format!("cp --sparse=always '{}' '{}'", self.before.display(), to.display());
        super::shell(Path::new("/"), &script);
        let image = File::options().write(true).open(to).unwrap();
        let records = &self.records[..count];
        let is_flush = |record: &Record| matches!(record, Record::Flush);
        let flushed = records.iter().rposition(is_flush).unwrap_or(0);
        for (at, record) in records.iter().enumerate() {
            let Record::Write { offset, data } = record else { continue };
            let kept = if at <= flushed { data.len() } else { keep(*offset, data.len()) };
            image.write_all_at(&data[..kept], *offset).unwrap();
        }
    }
}

/// How much is there of a write at `offset` that ended in the sector of its byte `length`.
fn torn(offset: u64, length: usize) -> usize {
    let end = (offset + length as u64) / SECTOR_BYTES * SECTOR_BYTES;
    usize::try_from(end.saturating_sub(offset)).unwrap()
}
