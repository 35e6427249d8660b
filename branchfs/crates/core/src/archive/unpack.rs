//! Reads an archive into a new layer that is not visible yet.
//!
//! Every path is resolved beneath the layer's root without following a symbolic link, so no name, link or order of members
//! leads out of the layer. If a member is invalid or needs rights that the caller lacks, the whole archive is refused and
//! the layer is removed.
//!
//! The slow part does not depend on the parent ([`unpack`]). The parent must not change only during the short second part
//! ([`Unpacked::finish`]).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use tar::{EntryType, Header};

use super::against::Against;
use super::sparse::{self, Sparse};
use super::{BLOCK_BYTES, EXTENSION_BYTES_MAX, OPAQUE, WHITEOUT, XATTR};
use crate::credentials::Credentials;
use crate::diff::{Side, find_below};
use crate::error::{Context, Error};
use crate::layer::Layer;
use crate::object_copy::{copy_attributes, drop_inherited_acls, times};
use crate::overlay::{DEVICE_XATTR, is_private_xattr};
use crate::ownership;

/// The longest path that is accepted in an archive, in bytes.
const PATH_BYTES_MAX: usize = 64 * 1024;

/// The owners that the files of the archive may get.
pub enum OwnershipPolicy<'p> {
    /// Anybody's, and devices.
    All,
    /// Only this user's; no devices.
    Of(&'p Credentials),
    /// All files get this user and group, whatever the archive says; no devices.
    Given(u32, u32),
}

/// The unpacked content of an archive, and the work that depends on the parent.
#[derive(Debug)]
pub struct Unpacked {
    /// Directories of the archive: their times are set after their last entry.
    directories: Vec<(PathBuf, Timestamps)>,
    /// Directories that the archive implies but does not contain.
    implied_dirs: BTreeSet<PathBuf>,
    /// The paths that the archive deletes.
    deleted: BTreeSet<PathBuf>,
    /// The state of the parent that the archive was made against.
    against: Against,
    has_record: bool,
}

/// Unpacks an archive into `layer`.
pub fn unpack(
    mut content: impl Read,
    layer: &Layer,
    rights: &OwnershipPolicy<'_>,
) -> Result<Unpacked, Error> {
    let unpacked = Unpacked {
        directories: Vec::new(),
        implied_dirs: BTreeSet::from([PathBuf::new()]),
        deleted: BTreeSet::new(),
        against: Against::default(),
        has_record: false,
    };
    let mut import = Import { layer, rights, unpacked };
    let mut extension = Extension::default();
    while let Some(header) = next_header(&mut content)? {
        let kind = header.entry_type();
        let is_extension = matches!(
            kind,
            EntryType::XHeader
                | EntryType::XGlobalHeader
                | EntryType::GNULongName
                | EntryType::GNULongLink
        );
        let stored = match extension.size {
            Some(size) if !is_extension => size,
            _ => header.entry_size().map_err(|error| damaged(&error))?,
        };
        let mut sparse = None;
        if kind == EntryType::GNUSparse {
            sparse = Some(Sparse::read_old(&header, &mut content)?);
        }
        let mut entry = (&mut content).take(stored);
        match kind {
            EntryType::XHeader => extension.read_pax(&read_extension(&mut entry)?)?,
            EntryType::XGlobalHeader => {
                import.unpacked.read_global(&read_extension(&mut entry)?)?;
            }
            EntryType::GNULongName => extension.path = Some(text(read_extension(&mut entry)?)),
            EntryType::GNULongLink => extension.target = Some(text(read_extension(&mut entry)?)),
            _ => {
                let extension = std::mem::take(&mut extension);
                let sparse = match extension.sparse.clone().parts(&mut entry)? {
                    None => sparse,
                    found => found,
                };
                if let Some(sparse) = &sparse {
                    sparse.check(entry.limit())?;
                }
                let member = Member::of(&header, extension, sparse)?;
                import.member(&member, &mut entry)?;
            }
        }
        let padding = stored.next_multiple_of(BLOCK_BYTES as u64) - stored;
        let left = entry.limit() + padding;
        let passed = io::copy(&mut (&mut content).take(left), &mut io::sink());
        if passed.map_err(|error| damaged(&error))? < left {
            return Err(cut_off());
        }
    }
    Ok(import.unpacked)
}

/// The next member's header; `None` at the end mark.
fn next_header(content: &mut impl Read) -> Result<Option<Header>, Error> {
    let mut header = Header::new_old();
    let block = header.as_mut_bytes();
    // Between two members there is no other sign of a truncated archive.
    content.read_exact(block).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => cut_off(),
        _ => damaged(&error),
    })?;
    if block.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let checksum = header.cksum().map_err(|error| damaged(&error))?;
    let mut again = header.clone();
    again.set_cksum();
    if again.cksum().ok() != Some(checksum) {
        return Err(damaged(&io::Error::other("archive header checksum mismatch")));
    }
    Ok(Some(header))
}

fn cut_off() -> Error {
    Error::Usage("the archive is cut off: its end mark is missing".to_owned())
}

impl Unpacked {
    /// Reads a global header, which applies to all members. Only comments are accepted, because other records could
    /// change the meaning of members.
    fn read_global(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for (key, value) in records(bytes)? {
            if key != b"comment" {
                let key = String::from_utf8_lossy(key).into_owned();
                return Err(Error::Usage(format!(
                    "the archive is refused: a global header sets {key}"
                )));
            }
            self.has_record |= self.against.read(value)?;
        }
        Ok(())
    }

    /// Whether the archive records the state that it was made against.
    pub(crate) fn has_record(&self) -> bool {
        self.has_record
    }

    /// Refuses a parent, with the layers `below`, that differs from the state that the archive was made against.
    ///
    /// # Errors
    /// `Conflict`, with the paths.
    pub(crate) fn check(&self, below: &[Arc<Layer>]) -> Result<(), Error> {
        self.against.check(below)
    }

    /// Lays the layer over `below`.
    pub(crate) fn finish(mut self, layer: &Layer, below: &[Arc<Layer>]) -> Result<(), Error> {
        for path in &self.implied_dirs {
            let Some(known) = find_below(below, path)?.filter(Side::is_directory) else { continue };
            let from = (&known.layer.tree, known.place.as_path());
            copy_attributes(from, (&layer.tree, path)).at(path)?;
            if !path.as_os_str().is_empty() {
                let stat = from.0.stat(from.1).at(path)?;
                self.directories.push((path.clone(), times(&stat)));
            }
        }
        for path in &self.deleted {
            match kind(layer, path)? {
                Some(FileType::Directory) => layer.set_opaque(path).at(path)?,
                Some(_) => {} // the archive has something else there
                None if find_below(below, path)?.is_some() => layer.put_whiteout(path).at(path)?,
                None => {}
            }
        }
        for (path, times) in &self.directories {
            layer.tree.set_times(path, times).at(path)?;
        }
        Ok(())
    }
}

fn kind(layer: &Layer, path: &Path) -> Result<Option<FileType>, Error> {
    match layer.tree.stat(path) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(u32::from(stat.stx_mode)))),
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::NOTDIR | Errno::LOOP) => Err(refused(path, "its parent is not a directory")),
        Err(error) => Err(error).at(path),
    }
}

fn damaged(error: &io::Error) -> Error {
    Error::Usage(format!("the archive cannot be read: {error}"))
}

fn refused(path: &Path, reason: &str) -> Error {
    Error::Usage(format!("the archive is refused: {}: {reason}", path.display()))
}

fn read_extension(entry: &mut impl Read) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    entry.take(EXTENSION_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| damaged(&error))?;
    if bytes.len() as u64 > EXTENSION_BYTES_MAX {
        return Err(Error::Usage("the archive is refused: a header of more than 1 MiB".to_owned()));
    }
    Ok(bytes)
}

/// Without the NUL that GNU tar appends.
fn text(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

/// Key and value.
type Record<'b> = (&'b [u8], &'b [u8]);

/// `LENGTH KEY=VALUE\n`, the length counting all of it.
fn records(mut bytes: &[u8]) -> Result<Vec<Record<'_>>, Error> {
    let wrong = || Error::Usage("the archive is refused: a damaged extended header".to_owned());
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let blank = bytes.iter().position(|byte| *byte == b' ').ok_or_else(wrong)?;
        let length: usize = std::str::from_utf8(&bytes[..blank])
            .ok()
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(wrong)?;
        let record = bytes.get(blank + 1..length).ok_or_else(wrong)?;
        let record = record.strip_suffix(b"\n").ok_or_else(wrong)?;
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(wrong)?;
        found.push((&record[..equals], &record[equals + 1..]));
        bytes = &bytes[length..];
    }
    Ok(found)
}

/// Extensions of the next member's header.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    /// The path of a sparse file. Its `path` is meant for programs that do not know the format.
    real_path: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    mtime: Option<(i64, u32)>,
    owner: (Option<u32>, Option<u32>),
    /// The size of the member's content in the archive.
    size: Option<u64>,
    sparse: SparseRecords,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The pax records `GNU.sparse.*` of one member.
#[derive(Clone, Default)]
struct SparseRecords {
    /// Version 1.0 or later has the map before the data.
    major: u64,
    size: Option<u64>,
    /// Offsets and lengths, in turn.
    map: Vec<u64>,
}

impl SparseRecords {
    /// The data ranges of a sparse file. Reads a map that precedes the data.
    fn parts(self, content: &mut impl Read) -> Result<Option<Sparse>, Error> {
        match self.size {
            None if self.major == 0 && self.map.is_empty() => Ok(None),
            Some(size) if self.major > 0 => Sparse::read_map(size, content).map(Some),
            Some(size) if self.map.len() % 2 == 0 => {
                let parts = self.map.chunks(2).map(|part| (part[0], part[1])).collect();
                Ok(Some(Sparse { size, parts }))
            }
            _ => Err(sparse::damaged()),
        }
    }

    /// Reads the record `GNU.sparse.KEY`; `false` for an unknown one.
    fn read(&mut self, key: &[u8], value: &[u8]) -> Result<bool, Error> {
        let number = |value: &[u8]| {
            let digits = std::str::from_utf8(value).ok();
            digits.and_then(|digits| digits.parse::<u64>().ok()).ok_or_else(sparse::damaged)
        };
        match key {
            b"major" => self.major = number(value)?,
            b"realsize" | b"size" => self.size = Some(number(value)?),
            b"offset" | b"numbytes" => self.map.push(number(value)?),
            b"map" if value.is_empty() => {}
            b"map" => {
                let map = value.split(|byte| *byte == b',').map(number);
                self.map = map.collect::<Result<_, _>>()?;
            }
            b"minor" | b"numblocks" => {}
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl Extension {
    fn read_pax(&mut self, bytes: &[u8]) -> Result<(), Error> {
        fn number<N: std::str::FromStr>(value: &[u8]) -> Result<N, Error> {
            let digits = std::str::from_utf8(value).ok();
            digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| {
                Error::Usage(
                    "the archive is refused: an owner or size that is not a number".to_owned(),
                )
            })
        }
        for (key, value) in records(bytes)? {
            if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                if key != b"name" && self.sparse.read(key, value)? {
                    continue;
                }
            }
            match key {
                b"GNU.sparse.name" => self.real_path = Some(value.to_vec()),
                b"size" => self.size = Some(number(value)?),
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.target = Some(value.to_vec()),
                b"mtime" => self.mtime = Some(time(value)?),
                b"uid" => self.owner.0 = Some(number(value)?),
                b"gid" => self.owner.1 = Some(number(value)?),
                b"atime" | b"ctime" | b"uname" | b"gname" | b"comment" | b"hdrcharset"
                | b"charset" => {}
                key => match key.strip_prefix(XATTR.as_bytes()) {
                    Some(name) => self.xattrs.push((name.to_vec(), value.to_vec())),
                    // LIBARCHIVE.xattr repeats SCHILY.xattr; the other fields are stored in the header, too.
                    None if key.starts_with(b"LIBARCHIVE.") || key.starts_with(b"SCHILY.") => {}
                    None => {
                        let key = String::from_utf8_lossy(key).into_owned();
                        return Err(Error::Usage(format!(
                            "the archive is refused: {key} is not known; pack it again without"
                        )));
                    }
                },
            }
        }
        Ok(())
    }
}

/// Decimal seconds.
fn time(value: &[u8]) -> Result<(i64, u32), Error> {
    let wrong = || Error::Usage("the archive is refused: a time that is not a number".to_owned());
    let text = std::str::from_utf8(value).map_err(|_| wrong())?;
    let (is_before, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let seconds: i64 = whole.parse().map_err(|_| wrong())?;
    let nine: String = fraction.chars().chain(std::iter::repeat('0')).take(9).collect();
    let nanoseconds: u32 = nine.parse().map_err(|_| wrong())?;
    Ok(match (is_before, nanoseconds) {
        (false, _) => (seconds, nanoseconds),
        (true, 0) => (-seconds, 0),
        (true, _) => (-seconds - 1, 1_000_000_000 - nanoseconds),
    })
}

struct Member {
    path: PathBuf,
    target: Vec<u8>,
    kind: EntryType,
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, u32),
    device: (u32, u32),
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    sparse: Option<Sparse>,
}

impl Member {
    fn of(header: &Header, extension: Extension, sparse: Option<Sparse>) -> Result<Self, Error> {
        let path = extension.real_path.or(extension.path);
        let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
        let path = relative_path(&path)?;
        let target = extension
            .target
            .or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned))
            .unwrap_or_default();
        let wrong = |error: io::Error| refused(&path, &error.to_string());
        let narrow = |number: u64| {
            u32::try_from(number).map_err(|_| refused(&path, "an owner out of range"))
        };
        let owner = (
            extension.owner.0.map_or_else(|| header.uid().map_err(wrong).and_then(narrow), Ok)?,
            extension.owner.1.map_or_else(|| header.gid().map_err(wrong).and_then(narrow), Ok)?,
        );
        let seconds = i64::try_from(header.mtime().map_err(wrong)?).unwrap_or(i64::MAX);
        let number = |number: io::Result<Option<u32>>| number.map(Option::unwrap_or_default);
        let kind = header.entry_type();
        let device = if matches!(kind, EntryType::Block | EntryType::Char) {
            (
                number(header.device_major()).map_err(wrong)?,
                number(header.device_minor()).map_err(wrong)?,
            )
        } else {
            (0, 0)
        };
        Ok(Self {
            mode: header.mode().map_err(wrong)? & 0o7777,
            mtime: extension.mtime.unwrap_or((seconds, 0)),
            xattrs: extension.xattrs,
            path,
            target,
            kind,
            owner,
            device,
            sparse,
        })
    }
}

/// A member's path, relative to the root.
fn relative_path(bytes: &[u8]) -> Result<PathBuf, Error> {
    let path = Path::new(OsStr::from_bytes(bytes));
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            _ => return Err(refused(path, "it leads outside of the workspace")),
        }
    }
    if bytes.is_empty() || bytes.contains(&0) || bytes.len() > PATH_BYTES_MAX {
        return Err(refused(path, "invalid path"));
    }
    if crate::view::is_hidden(clean.iter().next().map_or(Path::new(""), Path::new)) {
        return Err(refused(path, "the name is reserved for the store"));
    }
    Ok(clean)
}

struct Import<'i> {
    layer: &'i Layer,
    rights: &'i OwnershipPolicy<'i>,
    unpacked: Unpacked,
}

impl Import<'_> {
    fn member(&mut self, member: &Member, content: &mut impl Read) -> Result<(), Error> {
        let path = &member.path;
        let name = path.file_name().unwrap_or_default().as_bytes();
        if name == OPAQUE {
            let directory = path.parent().unwrap_or(Path::new(""));
            self.make_directories(directory)?;
            return self.layer.set_opaque(directory).at(directory);
        }
        if let Some(gone) = name.strip_prefix(WHITEOUT) {
            if gone.is_empty() || gone == b"." || gone == b".." || gone.starts_with(WHITEOUT) {
                return Err(refused(path, "whiteout without a file name"));
            }
            return self.remove(&path.with_file_name(OsStr::from_bytes(gone)));
        }
        if path.as_os_str().is_empty() {
            if member.kind != EntryType::Directory {
                return Err(refused(Path::new("."), "the root entry must be a directory"));
            }
            return self.describe(member);
        }
        self.make_directories(path.parent().unwrap_or(Path::new("")))?;
        if member.kind == EntryType::Directory {
            self.directory(path)?;
            return self.describe(member);
        }
        self.clear(path)?;
        match member.kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(path, content, member.sparse.as_ref())?;
            }
            EntryType::Symlink => {
                let target = OsStr::from_bytes(&member.target);
                self.layer.tree.make_symlink(path, target).at(path)?;
            }
            EntryType::Link => return self.link(member),
            EntryType::Fifo => self.special(member, libc::S_IFIFO)?,
            EntryType::Char => self.special(member, libc::S_IFCHR)?,
            EntryType::Block => self.special(member, libc::S_IFBLK)?,
            kind => {
                let what =
                    format!("a member of type {:?} is not known", char::from(kind.as_byte()));
                return Err(refused(path, &what));
            }
        }
        self.describe(member)
    }

    fn kind(&self, path: &Path) -> Result<Option<FileType>, Error> {
        kind(self.layer, path)
    }

    /// Creates the parent directories that the archive implies: as the parent has them, or new ones of the owner.
    fn make_directories(&mut self, path: &Path) -> Result<(), Error> {
        let mut missing = Vec::new();
        for ancestor in path.ancestors().filter(|ancestor| !ancestor.as_os_str().is_empty()) {
            match self.kind(ancestor)? {
                Some(FileType::Directory) => break,
                Some(_) => {
                    return Err(refused(
                        ancestor,
                        "entries are below it, but it is not a directory",
                    ));
                }
                None => missing.push(ancestor),
            }
        }
        missing.into_iter().rev().try_for_each(|directory| self.grant_directory(directory))
    }

    fn grant_directory(&mut self, path: &Path) -> Result<(), Error> {
        self.layer.tree.make_directory(path, 0o755).at(path)?;
        drop_inherited_acls(&self.layer.tree, path, |_| Ok(false)).at(path)?;
        self.layer.tree.set_mode(path, 0o755).at(path)?;
        self.unpacked.implied_dirs.insert(path.to_path_buf());
        let (uid, gid) = match self.rights {
            OwnershipPolicy::Given(uid, gid) => (*uid, *gid),
            OwnershipPolicy::Of(peer) => peer.ids(),
            OwnershipPolicy::All => return Ok(()),
        };
        ownership::set_in(&self.layer.tree, path, (uid, gid)).at(path)
    }

    fn directory(&mut self, path: &Path) -> Result<(), Error> {
        match self.kind(path)? {
            Some(FileType::Directory) => return Ok(()),
            Some(_) => self.clear(path)?,
            None => {}
        }
        self.layer.tree.make_directory(path, 0o700).at(path)
    }

    /// Removes an earlier member of the same name, because the last one counts. A directory is not replaced by another
    /// type.
    fn clear(&mut self, path: &Path) -> Result<(), Error> {
        match self.kind(path)? {
            None => Ok(()),
            Some(FileType::Directory) => Err(refused(
                path,
                "it is there twice, as a directory and \
                as another type",
            )),
            Some(_) => self.layer.tree.remove_file(path).at(path),
        }
    }

    fn remove(&mut self, path: &Path) -> Result<(), Error> {
        self.unpacked.deleted.insert(path.to_path_buf());
        self.make_directories(path.parent().unwrap_or(Path::new("")))?;
        self.kind(path).map(|_| ())
    }

    fn file(
        &self,
        path: &Path,
        content: &mut impl Read,
        sparse: Option<&Sparse>,
    ) -> Result<(), Error> {
        let mut file = std::fs::File::from(self.layer.tree.create_file(path, 0o600).at(path)?);
        // An error of the archive and one of the disk look the same here; either refuses the whole.
        let Some(sparse) = sparse else {
            io::copy(content, &mut file).at(path)?;
            return Ok(());
        };
        for (offset, length) in &sparse.parts {
            file.seek(io::SeekFrom::Start(*offset)).at(path)?;
            io::copy(&mut content.take(*length), &mut file).at(path)?;
        }
        file.set_len(sparse.size).at(path)
    }

    /// Creates a hard link. The target must come from the archive itself, not from a file of the base that the user may
    /// not even read.
    fn link(&self, member: &Member) -> Result<(), Error> {
        let target = relative_path(&member.target)?;
        match self.kind(&target)? {
            None | Some(FileType::Directory) => {
                let what = format!("its link target {} is not in the archive", target.display());
                Err(refused(&member.path, &what))
            }
            Some(_) => self.layer.tree.link(&target, &member.path).at(&member.path),
        }
    }

    fn special(&self, member: &Member, kind: u32) -> Result<(), Error> {
        let (path, (major, minor)) = (&member.path, member.device);
        if kind != libc::S_IFIFO && !matches!(self.rights, OwnershipPolicy::All) {
            return Err(refused(path, "only root can import devices"));
        }
        let device = rustix::fs::makedev(major, minor);
        self.layer.tree.make_node(path, kind | 0o600, device).at(path)?;
        if kind == libc::S_IFCHR && (major, minor) == (0, 0) {
            let mark = OsStr::new(DEVICE_XATTR);
            self.layer.tree.set_xattr(path, mark, b"y", XattrFlags::empty()).at(path)?;
        }
        Ok(())
    }

    fn describe(&mut self, member: &Member) -> Result<(), Error> {
        let (tree, path) = (&self.layer.tree, &member.path);
        let (uid, gid) = match self.rights {
            OwnershipPolicy::All => member.owner,
            OwnershipPolicy::Given(uid, gid) => (*uid, *gid),
            OwnershipPolicy::Of(peer) if peer.may_chown_to(member.owner.0, member.owner.1) => {
                member.owner
            }
            OwnershipPolicy::Of(_) => {
                let (uid, gid) = member.owner;
                let what = format!(
                    "it belongs to user {uid}, group {gid}, which you cannot give it to; import with --no-same-owner"
                );
                return Err(refused(path, &what));
            }
        };
        ownership::set_in(tree, path, (uid, gid)).at(path)?;
        drop_inherited_acls(tree, path, |name| {
            Ok(member.xattrs.iter().any(|(given, _)| given == name.as_bytes()))
        })
        .at(path)?;
        for (name, value) in &member.xattrs {
            let name = OsStr::from_bytes(name);
            let is_free = name.as_bytes().starts_with(b"user.")
                || name.as_bytes().starts_with(b"system.posix_acl_");
            if is_private_xattr(name) || !(is_free || matches!(self.rights, OwnershipPolicy::All)) {
                let what = format!("its attribute {} cannot be given", name.to_string_lossy());
                return Err(refused(path, &what));
            }
            tree.set_xattr(path, name, value, XattrFlags::empty()).at(path)?;
        }
        if member.kind != EntryType::Symlink {
            tree.set_mode(path, member.mode).at(path)?;
        }
        let time = Timespec { tv_sec: member.mtime.0, tv_nsec: i64::from(member.mtime.1) };
        let times = Timestamps { last_access: time, last_modification: time };
        if member.kind == EntryType::Directory {
            self.unpacked.implied_dirs.remove(path);
            self.unpacked.directories.push((path.clone(), times));
            return Ok(());
        }
        tree.set_times(path, &times).at(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_out_are_refused() {
        for path in ["/etc/passwd", "../x", "a/../../x", "", ".branching/x"] {
            assert!(relative_path(path.as_bytes()).is_err(), "{path}");
        }
        assert_eq!(relative_path(b"./a//b/").unwrap(), Path::new("a/b"));
        assert_eq!(relative_path(b"./").unwrap(), Path::new(""));
    }

    #[test]
    fn damaged_records_are_refused() {
        for bytes in
            [&b"x"[..], b"5 a=b", b"99 a=b\n", b"3 a\n", b"0 \n", b"18446744073709551616 a=b\n"]
        {
            assert!(records(bytes).is_err(), "{bytes:?}");
        }
        assert_eq!(records(b"6 a=b\n").unwrap(), [(&b"a"[..], &b"b"[..])]);
    }

    #[test]
    fn times_are_read_to_the_nanosecond() {
        assert_eq!(time(b"5.000000007").unwrap(), (5, 7));
        assert_eq!(time(b"-1.25").unwrap(), (-2, 750_000_000));
        assert_eq!(time(b"7").unwrap(), (7, 0));
        assert!(time(b"soon").is_err());
    }
}
