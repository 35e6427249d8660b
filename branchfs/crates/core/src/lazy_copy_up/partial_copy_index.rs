//! The partial copies of one layer: `partial/` has a file for each, named by its inode number, with its map
//! ([`super::blocks`]).
//!
//! The file is made before the copy comes into the layer and goes after the copy is whole, so one without a copy means
//! nothing, and a layer without any needs no search before a commit. What counts is the copy's own record.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::OFlags;

use super::PartialCopy;
use crate::error::{Context, Error};
use crate::no_follow;
use crate::ownership;
use crate::rooted_dir::{Result, to_errno};

/// The partial copies of one layer, by inode number.
#[derive(Debug)]
pub(crate) struct PartialCopyIndex {
    directory: PathBuf,
    /// Inode number -> the copy, while it is open.
    known: Mutex<HashMap<u64, Weak<PartialCopy>>>,
}

impl PartialCopyIndex {
    /// The table of a new layer.
    pub(crate) fn none(layer: &Path) -> Self {
        Self { directory: layer.join("partial"), known: Mutex::default() }
    }

    /// Reads the table of the layer in `layer`.
    pub(crate) fn open(layer: &Path) -> std::result::Result<Self, Error> {
        let directory = layer.join("partial");
        let mut known = HashMap::new();
        match no_follow::names(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            names => {
                for name in names.at(&directory)? {
                    if let Some(ino) = name.to_str().and_then(|name| name.parse().ok()) {
                        known.insert(ino, Weak::new());
                    }
                }
            }
        }
        Ok(Self { directory, known: Mutex::new(known) })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Weak<PartialCopy>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there may be any.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Whether the object with this inode number may be one.
    pub(crate) fn has(&self, ino: u64) -> bool {
        self.lock().contains_key(&ino)
    }

    /// A new object will be one.
    pub(crate) fn mark(&self, ino: u64) -> Result<()> {
        let marked = self.make(ino);
        marked.map_err(to_errno)?;
        self.lock().insert(ino, Weak::new());
        Ok(())
    }

    fn make(&self, ino: u64) -> std::io::Result<()> {
        let path = self.directory.join(ino.to_string());
        if let Err(error) = no_follow::write(&path, b"") {
            if error.kind() != ErrorKind::NotFound {
                return Err(error);
            }
            no_follow::make_directory(&self.directory)?;
            ownership::set_from_parent(&self.directory)?;
            no_follow::write(&path, b"")?;
        }
        ownership::set_from_parent(&path) // like all of the store
    }

    /// The file of a copy's map.
    pub(crate) fn map(&self, ino: u64) -> Result<OwnedFd> {
        let opened = no_follow::open_file(&self.directory.join(ino.to_string()), OFlags::RDWR);
        opened.map(OwnedFd::from).map_err(to_errno)
    }

    /// Removes the entry of a copy that is complete.
    pub(crate) fn unmark(&self, ino: u64) {
        self.lock().remove(&ino);
        // One that stays is looked at once more at the next start.
        let _ = no_follow::remove_file(&self.directory.join(ino.to_string()));
    }

    /// The open copy with this inode number; if it is not open, `open` opens it (`None` if the file is not a partial
    /// copy).
    pub(crate) fn get(
        &self,
        ino: u64,
        open: impl FnOnce() -> Result<Option<PartialCopy>>,
    ) -> Result<Option<Arc<PartialCopy>>> {
        let mut known = self.lock();
        let Some(entry) = known.get_mut(&ino) else {
            return Ok(None);
        };
        if let Some(copy) = entry.upgrade() {
            return Ok(Some(copy));
        }
        let Some(copy) = open()?.map(Arc::new) else {
            return Ok(None);
        };
        *entry = Arc::downgrade(&copy);
        Ok(Some(copy))
    }
}
