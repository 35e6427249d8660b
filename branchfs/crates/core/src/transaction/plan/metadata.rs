//! Attributes that a commit sets in place, and marks of the overlay format that it takes off.

use std::path::Path;

use rustix::fs::{FileType, Statx};

use super::{Planner, Source, kind_of};
use crate::diff::ChangeKind;
use crate::error::Error;
use crate::overlay::METACOPY_XATTR;
use crate::transaction::step::{Location, Metadata, Step};

impl Planner<'_> {
    /// The attributes that a directory of the base had at the fork, if our own transactions may have changed them since.
    pub(super) fn metadata_at_fork(&self, path: &Path) -> Result<Option<Metadata>, Error> {
        for veil in &self.request.veils {
            let place = Location::Store(veil.join(path));
            let stat = self.disk.stat(&place)?;
            if stat.is_some_and(|stat| kind_of(&stat) == FileType::Directory) {
                return self.disk.metadata(&place).map(Some);
            }
        }
        Ok(self.request.attributes_at_fork.get(path).cloned())
    }

    /// An object comes into the base without the marks that it bears in the layer. What makes a directory opaque is seen
    /// to where that is planned.
    pub(super) fn strip_marks(
        &mut self,
        now: &Location,
        path: &Path,
        kind: FileType,
    ) -> Result<(), Error> {
        if kind != FileType::CharacterDevice && !self.request.by_kernel {
            return Ok(());
        }
        let namespace = self.request.namespace;
        for (name, value) in self.disk.marks(now)? {
            if name == namespace.opaque() {
                continue;
            }
            let name = name.to_string_lossy().into_owned(); // names of attributes are ASCII
            let place = Location::Base(path.to_path_buf());
            self.metadata.push(Step::Strip { place, name, value });
        }
        Ok(())
    }

    /// A file of which the branch changed the attributes alone: the layer has it without its content, which the base has
    /// under the same name.
    pub(super) fn is_attributes_alone(
        &self,
        now: &Location,
        kind: FileType,
    ) -> Result<bool, Error> {
        Ok(kind == FileType::RegularFile
            && self.request.by_kernel
            && self.disk.xattr(now, METACOPY_XATTR)?.is_some()
            && self.disk.xattr(now, self.request.namespace.redirect())?.is_none())
    }

    pub(super) fn plan_attributes(
        &mut self,
        path: &Path,
        now: &Location,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Some(found) = found.filter(|found| kind_of(found) == FileType::RegularFile) else {
            // The branch has no content that could be put in its place, whoever wins.
            let message = "the content of a file that the branch changed the attributes of is gone from the base";
            return Err(Error::Conflict {
                message: message.to_owned(),
                paths: vec![path.to_path_buf()],
                hint: "the branch is still open: abort it, and start again from a new one",
            });
        };
        let (new, old) = (self.disk.metadata(now)?, self.disk.metadata(existing)?);
        self.change(path, ChangeKind::Metadata, None, FileType::RegularFile);
        let (path, before) = (Location::Base(path.to_path_buf()), existing.clone());
        self.metadata.push(Step::Metadata { path, before, ino: found.stx_ino, new, old });
        Ok(())
    }

    /// A directory on both sides takes the attributes that the branch shows.
    pub(super) fn plan_metadata(
        &mut self,
        path: &Path,
        top: &Source,
        existing: &Location,
    ) -> Result<(), Error> {
        let mut new = self.disk.metadata(&top.now)?;
        let is_made = self.plan.empty.contains(existing);
        let old = if is_made { new.clone() } else { self.disk.metadata(existing)? };
        if let Location::Base(path) = existing {
            if let Some(then) = self.metadata_at_fork(path)? {
                new.keep_changes(&then, &old);
            }
        }
        if !self.includes(path) {
            new = Metadata { mtime: new.mtime, ..old.clone() }; // on the way to something that is taken
        }
        let is_changed =
            (new.mode, new.uid, new.gid, &new.xattrs) != (old.mode, old.uid, old.gid, &old.xattrs);
        if is_changed && !path.as_os_str().is_empty() {
            self.change(path, ChangeKind::Metadata, None, FileType::Directory);
        }
        // Others who added or removed entries since the fork have left a later time, which is then the right one.
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
