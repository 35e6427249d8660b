//! Steps that set attributes in place and remove overlay attributes.

use std::path::Path;

use rustix::fs::{FileType, Statx};

use super::{BranchLayers, LayerDir, Planner, kind_of};
use crate::diff::ChangeKind;
use crate::error::Error;
use crate::overlay::METACOPY_XATTR;
use crate::transaction::step::{Location, Metadata, Step};

impl BranchLayers<'_> {
    /// The attributes that a directory of the base had at the fork, if our own transactions may have changed them since.
    pub(super) fn metadata_at_fork(&self, path: &Path) -> Result<Option<Metadata>, Error> {
        for snapshot_layer in &self.request.snapshot_layers {
            let place = Location::Store(snapshot_layer.join(path));
            let stat = self.disk.stat(&place)?;
            if stat.is_some_and(|stat| kind_of(&stat) == FileType::Directory) {
                return self.disk.metadata(&place).map(Some);
            }
        }
        Ok(self.request.attributes_at_fork.get(path).cloned())
    }

    /// Whether a file is a metacopy: the layer has only its attributes, and the base has the content under the same
    /// name.
    pub(super) fn is_metacopy(&self, now: &Location, kind: FileType) -> Result<bool, Error> {
        Ok(kind == FileType::RegularFile
            && self.request.by_kernel
            && self.disk.xattr(now, METACOPY_XATTR)?.is_some()
            && self.disk.xattr(now, self.request.namespace.redirect())?.is_none())
    }
}

impl Planner<'_> {
    /// Removes the overlay attributes of an object that is moved into the base. The opaque xattr is handled by the
    /// caller.
    pub(super) fn remove_overlay_xattrs(
        &mut self,
        now: &Location,
        path: &Path,
        kind: FileType,
    ) -> Result<(), Error> {
        if kind != FileType::CharacterDevice && !self.request.by_kernel {
            return Ok(());
        }
        let namespace = self.request.namespace;
        for (name, value) in self.disk.private_xattrs(now)? {
            if name == namespace.opaque() {
                continue;
            }
            let name = name.to_string_lossy().into_owned(); // names of attributes are ASCII
            let place = Location::Base(path.to_path_buf());
            self.metadata.push(Step::RemoveXattr { place, name, value });
        }
        Ok(())
    }

    pub(super) fn plan_attributes(
        &mut self,
        path: &Path,
        now: &Location,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Some(found) = found.filter(|found| kind_of(found) == FileType::RegularFile) else {
            // The branch has no content that could replace it, even if it overwrites.
            let message = "the content of a file that the branch changed the attributes of is gone from the base";
            return Err(Error::Conflict {
                message: message.to_owned(),
                paths: vec![path.to_path_buf()],
                hint: "the branch is still open: abort it, and start again from a new one",
            });
        };
        let (new, old) = (self.disk.metadata(now)?, self.disk.metadata(existing)?);
        self.plan.add_change(path, ChangeKind::Metadata, None, FileType::RegularFile);
        let (path, before) = (Location::Base(path.to_path_buf()), existing.clone());
        self.metadata.push(Step::Metadata { path, before, ino: found.stx_ino, new, old });
        Ok(())
    }

    /// Sets the attributes that the branch shows on a directory that exists on both sides.
    pub(super) fn plan_metadata(
        &mut self,
        path: &Path,
        top: &LayerDir,
        existing: &Location,
    ) -> Result<(), Error> {
        let mut new = self.disk.metadata(&top.now)?;
        let is_made = self.plan.empty.contains(existing);
        let old = if is_made { new.clone() } else { self.disk.metadata(existing)? };
        if let Location::Base(path) = existing {
            if let Some(then) = self.layers.metadata_at_fork(path)? {
                new.keep_changes(&then, &old);
            }
        }
        if !self.included.includes(path) {
            new = Metadata { mtime: new.mtime, ..old.clone() }; // only a parent of included paths
        }
        let is_changed =
            (new.mode, new.uid, new.gid, &new.xattrs) != (old.mode, old.uid, old.gid, &old.xattrs);
        if is_changed && !path.as_os_str().is_empty() {
            self.plan.add_change(path, ChangeKind::Metadata, None, FileType::Directory);
        }
        // If others added or removed entries since the fork, the directory has a later time, which is then right.
        let (seconds, nanoseconds) = old.mtime;
        if seconds * 1_000_000_000 + i64::from(nanoseconds) > self.request.forked {
            new.mtime = new.mtime.max(old.mtime);
        }
        let ino = self.disk.stat(existing)?.map_or(0, |stat| stat.stx_ino);
        self.metadata.push(Step::Metadata {
            path: Location::Base(path.to_path_buf()),
            before: existing.clone(),
            ino,
            new,
            old,
        });
        Ok(())
    }
}
