//! A branch made from an archive.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

use super::branch_ref::check_name;
use super::create_branch::create_filled;
use super::create_branch::{ImportedLayer, may_be_forked, refuse_disk_limit, refuse_taken};
use super::{BranchInfo, BranchRef, Workspace};
use crate::archive::{self, OwnershipPolicy};
use crate::error::{Context, Error};
use crate::no_follow;

impl Workspace {
    /// Creates a branch that is what the archive `content` says. All of it or nothing.
    ///
    /// The archive is read to its end first, into a file without a name in the store, and unpacked into a layer that is
    /// nobody's: however long that takes, it holds nobody up. Then the parent is forked.
    ///
    /// Returns also whether the archive says what it was made against. `force` loads it over what has changed since.
    ///
    /// # Errors
    /// As [`Self::create`]; `Conflict` where the parent is not what the archive was made against; `Usage` for an archive that is damaged or more than `rights` allow.
    pub fn import(
        &self,
        name: &str,
        parent: &BranchRef,
        mut content: File,
        rights: &OwnershipPolicy<'_>,
        force: bool,
    ) -> Result<(BranchInfo, bool), Error> {
        self.engine.admit_change()?;
        refuse_import(self, name, parent)?;
        let store = self.store();
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let directory = no_follow::open_directory(store).at(store)?;
        let spool = rustix::fs::openat(directory, ".", flags, Mode::RUSR | Mode::WUSR).at(store)?;
        let mut spool = File::from(spool);
        io::copy(&mut content, &mut spool).at(Path::new("the archive"))?;
        spool.rewind().at(store)?;
        let read = io::BufReader::with_capacity(1 << 20, spool);
        let id = self.store.next_number();
        let made =
            self.store.new_layer(id, true, &[Arc::clone(&self.store.base)]).and_then(|layer| {
                let unpacked = archive::unpack(read, &layer, rights)?;
                let has_record = unpacked.has_record();
                let filled = ImportedLayer { id, layer, unpacked, force };
                Ok((create_filled(self, name, parent, None, Some(filled))?, has_record))
            });
        made.inspect_err(|_| self.store.move_to_trash(&self.store.layer_path(id), "unmade"))
    }
}

/// What would be refused at the end is refused at the beginning.
fn refuse_import(workspace: &Workspace, name: &str, parent: &BranchRef) -> Result<(), Error> {
    check_name(OsStr::new(name))?;
    let branches = workspace.table.lock();
    refuse_taken(&branches, name)?;
    let Some(parent) = parent.find(&branches)? else { return Ok(()) };
    may_be_forked(parent)?;
    refuse_disk_limit(name, parent.quota.as_ref())
}
