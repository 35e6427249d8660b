//! Writing the archive, in the order of paths.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::FileType;
use tar::{Builder, EntryType, Header};

use super::against::Against;
use super::sparse::Sparse;
use super::{OUTPUT, WHITEOUT, XATTR};
use crate::diff::{OpenedFile, Pair, Reader, Side};
use crate::error::{Context, Error};
use crate::vfs::Time;

/// Longest name that fits into a header.
const HEADER_NAME_BYTES_MAX: usize = 100;

/// Writes the pairs of a walk. Renamed directories must have been listed name by name.
pub fn export(pairs: Vec<Pair>, reader: &mut Reader, out: &mut dyn Write) -> Result<(), Error> {
    let against = Against::of(&pairs, reader);
    let (mut present, mut before) = (BTreeMap::new(), BTreeSet::new());
    for pair in pairs {
        if is_same_root(&pair, reader)? {
            continue;
        }
        before.extend(pair.before.map(|side| side.path));
        if let Some(side) = pair.after {
            present.insert(side.path.clone(), side);
        }
    }
    refuse_what_has_no_place(&present)?;
    let gone: BTreeSet<PathBuf> =
        before.into_iter().filter(|path| !present.contains_key(path)).collect();
    let is_hidden_by_more = |path: &Path| {
        path.ancestors().skip(1).any(|above| {
            gone.contains(above) || present.get(above).is_some_and(|side| !side.is_directory())
        })
    };
    let mut names: BTreeMap<&Path, Option<&Side>> =
        present.iter().map(|(path, side)| (path.as_path(), Some(side))).collect();
    names.extend(gone.iter().filter(|path| !is_hidden_by_more(path)).map(|path| (&**path, None)));
    let mut archive = Archive { builder: Builder::new(out), reader, linked: HashMap::new() };
    against.write(&mut archive.builder)?;
    for (path, side) in names {
        match side {
            Some(side) => archive.member(side)?,
            None => archive.whiteout(path)?,
        }
    }
    archive.builder.finish().at(OUTPUT)
}

/// A walk always contains the root; an archive only if it changed.
fn is_same_root(pair: &Pair, reader: &mut Reader) -> Result<bool, Error> {
    let (Some(before), Some(after)) = (&pair.before, &pair.after) else { return Ok(false) };
    let shown = |side: &Side| (side.mode(), side.stat.owner(), side.stat.mtime);
    Ok(after.path.as_os_str().is_empty()
        && shown(before) == shown(after)
        && reader.xattrs(before)? == reader.xattrs(after)?)
}

/// Refuses objects that an archive cannot hold, because an incomplete archive is worse than none.
fn refuse_what_has_no_place(present: &BTreeMap<PathBuf, Side>) -> Result<(), Error> {
    for (path, side) in present {
        let name = path.file_name().unwrap_or_default().as_bytes();
        let reason = if name.starts_with(WHITEOUT) {
            "a name that begins with .wh. means a deletion in a layer"
        } else if side.kind() == FileType::Socket {
            "a socket cannot be in an archive; remove it first"
        } else {
            continue;
        };
        let path = path.display();
        return Err(Error::Unsupported(format!("{path} cannot be exported: {reason}")));
    }
    Ok(())
}

struct Archive<'a> {
    builder: Builder<&'a mut dyn Write>,
    reader: &'a mut Reader,
    /// First names of objects with several.
    linked: HashMap<(u64, u64), PathBuf>,
}

impl Archive<'_> {
    fn whiteout(&mut self, path: &Path) -> Result<(), Error> {
        let name = [WHITEOUT, path.file_name().unwrap_or_default().as_bytes()].concat();
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Regular);
        header.set_size(0);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        let path = path.with_file_name(OsStr::from_bytes(&name));
        self.append(header, path.as_os_str().as_bytes(), b"", Vec::new(), io::empty())
    }

    fn member(&mut self, side: &Side) -> Result<(), Error> {
        let mut header = Header::new_ustar();
        header.set_mode(side.mode());
        header.set_uid(side.stat.uid.into());
        header.set_gid(side.stat.gid.into());
        let Time { seconds, nanoseconds } = side.stat.mtime;
        header.set_mtime(u64::try_from(seconds).unwrap_or(0));
        header.set_size(0);
        let mut records: PaxRecords = Vec::new();
        if seconds < 0 || nanoseconds > 0 {
            records.push(("mtime".to_owned(), decimal(side.stat.mtime).into_bytes()));
        }
        for (name, value) in self.reader.xattrs(side)? {
            let name = name.into_string().map_err(|name| {
                Error::Unsupported(format!("the attribute {} has no place", name.to_string_lossy()))
            })?;
            records.push((format!("{XATTR}{name}"), value));
        }
        let mut name = if side.path.as_os_str().is_empty() {
            b".".to_vec()
        } else {
            side.path.as_os_str().as_bytes().to_vec()
        };
        if side.is_directory() {
            name.push(b'/');
        } else if side.stat.nlink > 1 {
            let object = (side.layer.id.0, side.stat.ino);
            if let Some(first) = self.linked.get(&object) {
                let target = first.as_os_str().as_bytes().to_vec();
                header.set_entry_type(EntryType::Link);
                records.retain(|(key, _)| key == "mtime");
                return self.append(header, &name, &target, records, io::empty());
            }
            self.linked.insert(object, side.path.clone());
        }
        let kind = match side.kind() {
            FileType::RegularFile => {
                let file = self.reader.open(side)?;
                let size = file.size().at(&side.path)?;
                let parts = file.data().at(&side.path)?;
                header.set_entry_type(EntryType::Regular);
                let mut map = Vec::new();
                let bytes: u64 = parts.iter().map(|part| part.end - part.start).sum();
                if bytes < size {
                    let ends_in_a_hole = parts.last().is_none_or(|last| last.end < size);
                    let parts = parts.iter().map(|part| (part.start, part.end - part.start));
                    // As GNU tar does, which takes the end of the last part for the file's.
                    let parts = parts.chain(ends_in_a_hole.then_some((size, 0))).collect();
                    map = Sparse { size, parts }.to_map();
                    records.extend([
                        ("GNU.sparse.major".to_owned(), b"1".to_vec()),
                        ("GNU.sparse.minor".to_owned(), b"0".to_vec()),
                        ("GNU.sparse.name".to_owned(), name.clone()),
                        ("GNU.sparse.realsize".to_owned(), size.to_string().into_bytes()),
                    ]);
                    if std::str::from_utf8(&name).is_err() {
                        records.insert(0, ("hdrcharset".to_owned(), b"BINARY".to_vec()));
                    }
                    name = sparse_name(&side.path);
                }
                header.set_size(map.len() as u64 + bytes);
                let content = io::Cursor::new(map).chain(DataRanges { file, parts: parts.into() });
                return self.append(header, &name, b"", records, content).map_err(|error| {
                    let is_short = matches!(&error, Error::Io { source, .. }
                        if source.kind() == io::ErrorKind::UnexpectedEof);
                    if is_short { Error::Changed(side.path.clone()) } else { error }
                });
            }
            FileType::Symlink => {
                let target = self.reader.link_target(side)?;
                header.set_entry_type(EntryType::Symlink);
                return self.append(header, &name, &target, records, io::empty());
            }
            FileType::Directory => EntryType::Directory,
            FileType::Fifo => EntryType::Fifo,
            FileType::BlockDevice => EntryType::Block,
            _ => EntryType::Char,
        };
        header.set_entry_type(kind);
        if matches!(kind, EntryType::Block | EntryType::Char) {
            let (major, minor) = side.stat.rdev;
            header.set_device_major(major).at(OUTPUT)?;
            header.set_device_minor(minor).at(OUTPUT)?;
        }
        self.append(header, &name, b"", records, io::empty())
    }

    fn append(
        &mut self,
        mut header: Header,
        name: &[u8],
        target: &[u8],
        mut records: PaxRecords,
        content: impl Read,
    ) -> Result<(), Error> {
        let mut has_charset = records.first().is_some_and(|(key, _)| key == "hdrcharset");
        for (key, text) in [("path", name), ("linkpath", target)] {
            if text.len() > HEADER_NAME_BYTES_MAX {
                if std::str::from_utf8(text).is_err() && !has_charset {
                    records.insert(0, ("hdrcharset".to_owned(), b"BINARY".to_vec()));
                    has_charset = true;
                }
                records.push((key.to_owned(), text.to_vec()));
            }
        }
        if !records.is_empty() {
            let records = records.iter().map(|(key, value)| (key.as_str(), value.as_slice()));
            self.builder.append_pax_extensions(records).at(OUTPUT)?;
        }
        let old = header.as_old_mut();
        let fill = |field: &mut [u8], text: &[u8]| {
            let length = text.len().min(field.len());
            field[..length].copy_from_slice(&text[..length]);
        };
        fill(&mut old.name, name);
        fill(&mut old.linkname, target);
        header.set_cksum();
        self.builder.append(&header, content).at(OUTPUT)
    }
}

type PaxRecords = Vec<(String, Vec<u8>)>;

/// Seconds with nine fractional digits; before 1970 the fraction counts from the next lower second.
fn decimal(Time { seconds, nanoseconds }: Time) -> String {
    if seconds >= 0 || nanoseconds == 0 {
        return format!("{seconds}.{nanoseconds:09}");
    }
    let whole = -(seconds + 1);
    format!("-{whole}.{:09}", 1_000_000_000 - nanoseconds)
}

/// The name for programs that do not know the format, as GNU tar writes it.
fn sparse_name(path: &Path) -> Vec<u8> {
    let directory = path.parent().unwrap_or(Path::new("")).join("GNUSparseFile.0");
    directory.join(path.file_name().unwrap_or_default()).into_os_string().into_vec()
}

/// The data ranges of a sparse file, which must be as long as the header says.
struct DataRanges {
    file: OpenedFile,
    /// The ranges that are not read yet.
    parts: VecDeque<Range<u64>>,
}

impl Read for DataRanges {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.parts.front().is_some_and(Range::is_empty) {
            self.parts.pop_front();
        }
        let Some(part) = self.parts.front_mut() else { return Ok(0) };
        let length = usize::try_from(part.end - part.start).unwrap_or(usize::MAX);
        let length = length.min(buffer.len());
        let read = self.file.read_at(&mut buffer[..length], part.start)?;
        if read == 0 && length > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        part.start += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_are_decimal_fractions_too() {
        let text = |seconds, nanoseconds| decimal(Time { seconds, nanoseconds });
        assert_eq!(text(5, 7), "5.000000007");
        assert_eq!(text(-2, 750_000_000), "-1.250000000");
        assert_eq!(text(-1, 999_999_999), "-0.000000001");
        assert_eq!(text(-3, 0), "-3.000000000");
    }
}
