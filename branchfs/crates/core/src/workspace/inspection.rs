//! The look at a store before it is used: everything that BranchFS creates in it by a name of its own is a directory, or a
//! regular file with one name.
//!
//! A store may have come with a stranger's directory. Each use of such an object refuses a symbolic link, a FIFO, a device
//! or a file with other hard links ([`crate::no_follow`]); this refuses the whole store before anything in it is changed.
//! Objects that come from the base or a branch (the content of layers, before-images) may be of any kind: they are only
//! reached beneath the store, and are not looked at here.
//!
//! Cost: one `statx` for each file or directory that belongs to a layer or a transaction.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat};

use crate::error::{Context, Error};
use crate::no_follow::{self, Refusal};

/// Symbolic links that belong to a store: the xattr namespace, and the links between the parts of an external store.
const OWN_LINKS: [&str; 3] = ["marks", "store", "base"];

/// Files of a transaction, and its directories that hold such files.
const TRANSACTION: [&str; 6] = ["plan", "plan.new", "rollback", "finished", "redone", "undone"];

/// A kind of directory in the store, by its possible entries.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Directory {
    Store,
    /// A directory that contains only files.
    Files,
    Layers,
    Layer,
    /// `journal` or `history`.
    Transactions,
    Transaction,
    /// Not looked into.
    Content,
}

impl Directory {
    /// The directory `name` in this one; `None` if entries may have any name there.
    fn subdirectory(self, name: &OsStr) -> Option<Self> {
        let is = |known: &str| name == known;
        Some(match self {
            Self::Store if is("branches") => Self::Files,
            Self::Store if is("layers") => Self::Layers,
            Self::Store if is("journal") || is("history") => Self::Transactions,
            Self::Layers => Self::Layer,
            Self::Layer if is("partial") => Self::Files,
            Self::Store | Self::Layer | Self::Files => Self::Content,
            Self::Transactions => Self::Transaction,
            Self::Transaction if name.as_bytes().starts_with(b"layer-") => Self::Layer,
            Self::Transaction if TRANSACTION.iter().any(|known| is(known)) => Self::Transaction,
            Self::Transaction | Self::Content => return None,
        })
    }
}

/// Refuses a store with an object that BranchFS does not create there.
///
/// # Errors
/// `Refused` with its path.
pub fn inspect(store: &Path) -> Result<(), Error> {
    let mut pending = vec![(store.to_path_buf(), Directory::Store)];
    while let Some((path, directory)) = pending.pop() {
        for name in no_follow::names(&path).at(&path)? {
            let entry = path.join(&name);
            let Some(below) = directory.subdirectory(&name) else { continue };
            let Some(found) = no_follow::stat(&entry).at(&entry)? else { continue };
            if directory == Directory::Store && OWN_LINKS.iter().any(|known| name == *known) {
                continue;
            }
            pending.extend(look(&entry, &found, below)?.filter(|_| below != Directory::Content));
        }
    }
    Ok(())
}

fn look(
    path: &Path,
    found: &Stat,
    below: Directory,
) -> Result<Option<(PathBuf, Directory)>, Error> {
    let refused = |refusal: Refusal| Err(std::io::Error::from(refusal)).at(path);
    match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory => Ok(Some((path.to_path_buf(), below))),
        FileType::Symlink => refused(Refusal::Symlink),
        FileType::RegularFile if found.st_nlink > 1 => refused(Refusal::HardLink),
        FileType::RegularFile => Ok(None),
        _ => refused(Refusal::NotRegular),
    }
}
