//! Creating a branch from an archive.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

use super::branch_ref::check_name;
use super::create_branch::{ImportedLayer, may_be_forked, refuse_disk_limit, refuse_taken};
use super::create_branch::{create_filled, write_lease};
use super::{BranchInfo, BranchRef, Workspace};
use crate::archive::{self, OwnershipPolicy};
use crate::error::{Context, Error};
use crate::no_follow;

impl Workspace {
    /// Creates a branch with the content of the archive `content`. All of it or nothing.
    ///
    /// The archive is first read to its end into an unnamed file in the store and unpacked into a layer that belongs to
    /// no branch. However long that takes, no other verb waits. Then the parent is forked.
    ///
    /// Also returns whether the archive records the state that it was made against. `force` loads it over later
    /// changes. `leases` gets a line before the branch exists, as in [`Self::create_leased`].
    ///
    /// # Errors
    /// As [`Self::create`]; `Conflict` if the parent differs from the recorded state; `Usage` for an archive that is
    /// damaged or needs more than `rights`.
    pub fn import(
        &self,
        name: &str,
        parent: &BranchRef,
        mut content: File,
        rights: &OwnershipPolicy<'_>,
        force: bool,
        leases: Option<&mut File>,
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
                if let Some(leases) = leases {
                    write_lease(id, name, leases)?;
                }
                let filled = ImportedLayer { layer, unpacked, force };
                Ok((create_filled(self, name, parent, None, id, Some(filled))?, has_record))
            });
        made.inspect_err(|_| self.store.move_to_trash(&self.store.layer_path(id), "unmade"))
    }
}

/// Refuses at the beginning what would be refused at the end.
fn refuse_import(workspace: &Workspace, name: &str, parent: &BranchRef) -> Result<(), Error> {
    check_name(OsStr::new(name))?;
    let branches = workspace.table.lock();
    refuse_taken(&branches, name)?;
    let Some(parent) = parent.find(&branches)? else { return Ok(()) };
    may_be_forked(parent)?;
    refuse_disk_limit(name, parent.quota.as_ref())
}
