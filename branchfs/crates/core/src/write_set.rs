//! The write set of a layer: the state of each path of the base when the branch first depended on it, and the inode numbers
//! that copied-up files show.
//!
//! One JSON object a line, appended without a sync: `{"path":"6162","seen":null}` (nothing was there),
//! `{"path":"6162","seen":{…}}` (an object), `{"ino":12,"shown":7}`, `{"ino":12,"shown":null}`,
//! `{"ino":12,"links":2}` (how many links it shows), `{"layer":0,"lower":9,"hidden":1}` (how many names of a lower object are hidden). Paths are the bytes in
//! hexadecimal. An incomplete line ends the log; later paths count as unknown, which means drift if they were changed after
//! the fork.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{OFlags, Statx};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::descriptors::{Kept, Owner, with_room_io};
use crate::no_follow;
use crate::ownership;
use crate::rooted_dir::{stat_of, to_errno};
use crate::vfs::Time;

/// The identity of a state of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Fingerprint {
    /// File type bits of the mode.
    pub(crate) kind: u32,
    pub(crate) ino: u64,
    pub(crate) size: u64,
    /// Nanoseconds since 1970.
    pub(crate) mtime: i64,
    /// Nanoseconds since 1970.
    pub(crate) ctime: i64,
}

impl Fingerprint {
    /// No object is this one: whatever is found has changed.
    pub(crate) const NEVER: Self = Self { kind: 0, ino: 0, size: 0, mtime: 0, ctime: 0 };

    pub(crate) fn of(stat: &Statx) -> Self {
        const KIND_MASK: u32 = 0o170_000;
        Self {
            kind: u32::from(stat.stx_mode) & KIND_MASK,
            ino: stat.stx_ino,
            size: stat.stx_size,
            mtime: Time::from(stat.stx_mtime).as_nanoseconds(),
            ctime: Time::from(stat.stx_ctime).as_nanoseconds(),
        }
    }

    pub(crate) fn is_directory(&self) -> bool {
        const DIRECTORY: u32 = 0o040_000;
        self.kind == DIRECTORY
    }

    /// Whether the content can be assumed to be equal: renames, links and changes of mode change only the ctime.
    pub(crate) fn has_content_of(&self, other: &Self) -> bool {
        (self.kind, self.ino, self.size, self.mtime)
            == (other.kind, other.ino, other.size, other.mtime)
    }

    /// Returns whether `now` is the recorded state. For a directory only the inode is compared: its times change with its
    /// entries, which are compared separately.
    pub(crate) fn matches(&self, now: &Self) -> bool {
        if self.is_directory() { (self.kind, self.ino) == (now.kind, now.ino) } else { self == now }
    }
}

/// The state that a path of the base must still have at commit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Precondition {
    Absent,
    Present(Fingerprint),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Record {
    Path { path: String, seen: Option<Fingerprint> },
    // Before `Origin`, whose optional field would match anything with an `ino`.
    Links { ino: u64, links: u32 },
    Hidden { layer: u64, lower: u64, hidden: u32 },
    Origin { ino: u64, shown: Option<u64> },
}

/// A file that is appended to, created with the first line. Its descriptor is kept open as long as there is room.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    is_made: bool,
    kept: Owner,
}

impl Log {
    /// The log of a new layer.
    fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), is_made: false, kept: Owner::new() }
    }

    fn open(path: &Path) -> io::Result<Self> {
        let mut log = Self::new(path);
        match no_follow::open_file(path, OFlags::WRONLY | OFlags::APPEND) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => log.is_made = other.map(|_| true)?,
        }
        Ok(log)
    }

    fn append(&mut self) -> io::Result<Arc<OwnedFd>> {
        if let Some(kept) = self.kept.get(OsStr::new("")) {
            return Ok(kept.file);
        }
        let flags = OFlags::WRONLY | OFlags::APPEND;
        let flags = if self.is_made { flags } else { flags | OFlags::CREATE };
        let opened = with_room_io(|| no_follow::open_file(&self.path, flags))?;
        if !self.is_made {
            ownership::set_from_parent(&self.path)?;
            self.is_made = true;
        }
        let file = Arc::new(OwnedFd::from(opened));
        self.kept.keep(OsStr::new(""), Kept { file: Arc::clone(&file), identity: (0, 0, 0) });
        Ok(file)
    }
}

/// The log, open for appending.
#[derive(Debug)]
pub(crate) struct WriteSet(Log);

/// What the lines of a write set say.
#[derive(Debug, Default)]
pub(crate) struct WriteSetContents {
    /// The first record of each path.
    pub(crate) preconditions: BTreeMap<PathBuf, Precondition>,
    /// Inode number in the layer -> inode number shown.
    pub(crate) origins: HashMap<u64, u64>,
    /// Inode number in the layer -> number of links shown, where it differs from the number of names in the layer.
    pub(crate) links: HashMap<u64, u32>,
    /// Layer and inode number of a lower object -> how many of its names this layer hides.
    pub(crate) hidden: HashMap<(u64, u64), u32>,
}

impl WriteSet {
    /// The log of a new layer.
    pub(crate) fn new(path: &Path) -> Self {
        Self(Log::new(path))
    }

    /// Opens the log for appending. Removes an incomplete line that a crash left at the end: a record appended to it
    /// would be lost, and all that follow.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut log = Log::open(path)?;
        if !log.is_made {
            return Ok(Self(log));
        }
        let bytes = no_follow::read(path)?;
        let lines = bytes.split_inclusive(|byte| *byte == b'\n').take_while(|line| is_whole(line));
        let whole = lines.map(<[u8]>::len).sum::<usize>();
        if whole < bytes.len() {
            rustix::fs::ftruncate(&*log.append()?, whole as u64)?;
        }
        Ok(Self(log))
    }

    pub(crate) fn load(path: &Path) -> io::Result<WriteSetContents> {
        let mut loaded = WriteSetContents::default();
        let file = match no_follow::open_file(path, OFlags::RDONLY) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(loaded),
            Err(error) => return Err(error),
        };
        for line in BufReader::new(file).split(b'\n') {
            let Ok(record) = serde_json::from_slice(&line?) else {
                break;
            };
            match record {
                Record::Path { path, seen } => {
                    let Some(path) = from_hex(&path) else { break };
                    loaded
                        .preconditions
                        .entry(path)
                        .or_insert(seen.map_or(Precondition::Absent, Precondition::Present));
                }
                Record::Origin { ino, shown: Some(shown) } => {
                    loaded.origins.insert(ino, shown);
                }
                Record::Origin { ino, shown: None } => {
                    loaded.origins.remove(&ino);
                }
                Record::Hidden { layer, lower, hidden } => {
                    loaded.hidden.insert((layer, lower), hidden);
                }
                Record::Links { ino, links } => {
                    loaded.links.insert(ino, links);
                }
            }
        }
        Ok(loaded)
    }

    /// Replaces the recorded state of each path by that of `now`. The log is replaced atomically: a crash leaves the old or
    /// the new one.
    pub(crate) fn update_preconditions(
        &mut self,
        now: impl Fn(&Path) -> Result<Precondition, Errno>,
    ) -> Result<(), Errno> {
        let path = self.0.path.clone();
        let mut text = match no_follow::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(to_errno)?,
        };
        let lines: Vec<Record> = text
            .split(|byte| *byte == b'\n')
            .map_while(|line| serde_json::from_slice(line).ok())
            .collect();
        text.clear();
        for mut record in lines {
            if let Record::Path { path, seen } = &mut record {
                let Some(path) = from_hex(path) else { break };
                *seen = match now(&path)? {
                    Precondition::Absent => None,
                    Precondition::Present(identity) => Some(identity),
                };
            }
            serde_json::to_writer(&mut text, &record).map_err(|_| Errno::IO)?;
            text.push(b'\n');
        }
        let draft = path.with_extension("new");
        let written = || {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
            let mut file = no_follow::open_file(&draft, flags)?;
            file.write_all(&text)?;
            file.sync_data()?;
            ownership::set_from_parent(&draft)?;
            no_follow::rename(&draft, &path)?;
            Log::open(&path)
        };
        self.0 = written().map_err(to_errno)?;
        Ok(())
    }

    pub(crate) fn record_precondition(
        &mut self,
        path: &Path,
        expected: Precondition,
    ) -> Result<(), Errno> {
        let seen = match expected {
            Precondition::Absent => None,
            Precondition::Present(identity) => Some(identity),
        };
        self.append(&Record::Path { path: to_hex(path), seen })
    }

    pub(crate) fn origin(&mut self, ino: u64, shown: u64) -> Result<(), Errno> {
        self.append(&Record::Origin { ino, shown: Some(shown) })
    }

    pub(crate) fn links(&mut self, ino: u64, links: u32) -> Result<(), Errno> {
        self.append(&Record::Links { ino, links })
    }

    pub(crate) fn hidden(&mut self, (layer, lower): (u64, u64), hidden: u32) -> Result<(), Errno> {
        self.append(&Record::Hidden { layer, lower, hidden })
    }

    pub(crate) fn record_removed(&mut self, ino: u64) -> Result<(), Errno> {
        self.append(&Record::Origin { ino, shown: None })
    }

    pub(crate) fn sync(&mut self) -> Result<(), Errno> {
        if !self.0.is_made {
            return Ok(());
        }
        rustix::fs::fdatasync(&*self.0.append().map_err(to_errno)?)
    }

    /// One `write`, so that a crash can only leave the last record incomplete. A full disk may take half a line; that
    /// half is removed, because later readers would stop there.
    fn append(&mut self, record: &Record) -> Result<(), Errno> {
        let mut line = serde_json::to_vec(record).map_err(|_| Errno::IO)?;
        line.push(b'\n');
        let file = self.0.append().map_err(to_errno)?;
        let before = stat_of(&*file)?.stx_size;
        write_all(&file, &line).inspect_err(|_| {
            // Where even that fails, opening the log again does it.
            let _ = rustix::fs::ftruncate(&*file, before);
        })
    }
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(file, bytes))?;
        bytes = &bytes[written..];
    }
    Ok(())
}

/// A line of the log that can be read.
fn is_whole(line: &[u8]) -> bool {
    line.ends_with(b"\n") && serde_json::from_slice::<Record>(line).is_ok()
}

/// How a branch read a path of its snapshot (S7).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Read {
    /// A file was opened, or a link read.
    Content,
    /// A directory was listed.
    Names,
    /// A name was looked up and not found.
    #[serde(rename = "missing")]
    NegativeLookup,
}

#[derive(Serialize, Deserialize)]
struct ReadRecord {
    path: String,
    read: Read,
}

/// The read set of a branch: a log of JSON lines, `{"path":"6162","read":"content"}`, appended without a sync. A branch
/// whose log was cut short by a crash of the machine may miss conflicts; its unsynced writes are lost with it.
#[derive(Debug)]
pub(crate) struct ReadSet {
    log: Log,
    noted: HashSet<(PathBuf, Read)>,
}

impl ReadSet {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let noted = Self::load(path)?.into_iter().collect();
        let mut log = Log::open(path)?;
        log.append()?; // the file shows that reads are recorded, even if there were none
        Ok(Self { log, noted })
    }

    pub(crate) fn load(path: &Path) -> io::Result<Vec<(PathBuf, Read)>> {
        let file = match no_follow::open_file(path, OFlags::RDONLY) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut found = Vec::new();
        for line in BufReader::new(file).lines() {
            let Ok(ReadRecord { path, read }) = serde_json::from_str(&line?) else { break };
            let Some(path) = from_hex(&path) else { break };
            found.push((path, read));
        }
        Ok(found)
    }

    fn note_new(&mut self, path: &Path, read: Read) -> io::Result<()> {
        let mut line = serde_json::to_vec(&ReadRecord { path: to_hex(path), read })?;
        line.push(b'\n');
        write_all(&*self.log.append()?, &line)?;
        self.noted.insert((path.to_path_buf(), read));
        Ok(())
    }

    pub(crate) fn record(&mut self, path: &Path, read: Read) -> Result<(), Errno> {
        if self.noted.contains(&(path.to_path_buf(), read)) {
            return Ok(());
        }
        self.note_new(path, read).map_err(to_errno)
    }
}

/// A path as hexadecimal digits, because JSON text cannot hold bytes outside UTF-8.
pub(crate) fn to_hex(path: &Path) -> String {
    use std::fmt::Write as _;
    path.as_os_str().as_bytes().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // a String takes all that is written
        text
    })
}

/// The path that [`to_hex`] wrote; `None` if the text is not hexadecimal.
pub(crate) fn from_hex(text: &str) -> Option<PathBuf> {
    let digits = text.as_bytes();
    if digits.len() % 2 != 0 {
        return None;
    }
    let bytes: Option<Vec<u8>> = digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect();
    Some(PathBuf::from(OsString::from_vec(bytes?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::{assert_examples, assert_fields, example};

    fn identity(ino: u64) -> Fingerprint {
        Fingerprint { kind: 0o100_000, ino, size: 3, mtime: 5, ctime: 6 }
    }

    #[test]
    fn the_document_of_the_format_has_the_lines_of_the_logs() {
        assert_examples::<Record>("Write set");
        assert_fields::<Fingerprint>("Fingerprint", "field", &example("Write set", "/seen"));
        assert_examples::<ReadRecord>("Read set");
        assert_fields::<ReadRecord>("Read set", "field", &example("Read set", ""));
    }

    #[test]
    fn the_first_record_of_a_path_counts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("writes");
        let mut log = WriteSet::open(&path).unwrap();
        let odd = Path::new(std::ffi::OsStr::from_bytes(b"a\xff\n"));
        log.record_precondition(odd, Precondition::Present(identity(1))).unwrap();
        log.record_precondition(odd, Precondition::Absent).unwrap();
        log.origin(10, 7).unwrap();
        log.origin(11, 8).unwrap();
        log.record_removed(11).unwrap();
        let loaded = WriteSet::load(&path).unwrap();
        assert_eq!(loaded.preconditions.get(odd), Some(&Precondition::Present(identity(1))));
        assert_eq!(loaded.origins, HashMap::from([(10, 7)]));
    }

    #[test]
    fn a_torn_last_line_loses_that_line_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("writes");
        let mut log = WriteSet::open(&path).unwrap();
        log.record_precondition(Path::new("whole"), Precondition::Absent).unwrap();
        log.record_precondition(Path::new("torn"), Precondition::Absent).unwrap();
        let length = std::fs::metadata(&path).unwrap().len();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 4).unwrap();
        let loaded = WriteSet::load(&path).unwrap();
        assert_eq!(loaded.preconditions.keys().collect::<Vec<_>>(), [Path::new("whole")]);
        // What is appended after the next start is found again.
        let mut log = WriteSet::open(&path).unwrap();
        log.record_precondition(Path::new("later"), Precondition::Absent).unwrap();
        let loaded = WriteSet::load(&path).unwrap();
        assert_eq!(
            loaded.preconditions.keys().collect::<Vec<_>>(),
            [Path::new("later"), Path::new("whole")]
        );
    }

    #[test]
    fn garbage_at_the_end_ends_the_log_and_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("writes");
        let mut log = WriteSet::open(&path).unwrap();
        log.record_precondition(Path::new("whole"), Precondition::Absent).unwrap();
        for garbage in [&b"\xff\xfe\xfd"[..], b"\0\0\0\0", b"{\"path\":\"6\",", b"\xff\n\n"] {
            let good = std::fs::read(&path).unwrap();
            std::fs::write(&path, [&good, garbage].concat()).unwrap();
            let loaded = WriteSet::load(&path).unwrap();
            assert_eq!(loaded.preconditions.keys().collect::<Vec<_>>(), [Path::new("whole")]);
            let mut log = WriteSet::open(&path).unwrap();
            log.origin(1, 2).unwrap();
            assert_eq!(WriteSet::load(&path).unwrap().origins, HashMap::from([(1, 2)]));
            std::fs::write(&path, good).unwrap();
        }
    }

    #[test]
    fn a_full_disk_leaves_no_half_line() {
        let directory = tempfile::tempdir().unwrap();
        let script = "mount -t tmpfs -o size=4k none \"$0\"";
        let status = std::process::Command::new("sh")
            .args(["-c", script])
            .arg(directory.path())
            .status()
            .unwrap();
        assert!(status.success());
        let path = directory.path().join("writes");
        let mut log = WriteSet::open(&path).unwrap();
        let name = |number: usize| std::path::PathBuf::from(format!("{number:0>100}"));
        let fits = (0..)
            .find(|number| log.record_precondition(&name(*number), Precondition::Absent).is_err())
            .unwrap();
        let length = std::fs::metadata(&path).unwrap().len();
        assert!(std::fs::read(&path).unwrap().ends_with(b"\n"), "{length} bytes");
        let loaded = WriteSet::load(&path).unwrap().preconditions.len();
        drop(log);
        rustix::mount::unmount(directory.path(), rustix::mount::UnmountFlags::empty()).unwrap();
        assert!(fits > 5 && loaded == fits, "{fits} fitted, {loaded} found");
    }
}
