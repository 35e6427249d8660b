//! Checks for drift: whether the base is as the branch saw it (S8), and whether the commit can be applied to it.

use std::path::Path;

use rustix::fs::{OFlags, Statx, StatxAttributes};

use super::{BranchLayers, Planner};
use crate::error::{Context, Error};
use crate::overlay::may_be_whiteout;
use crate::transaction::step::{Location, TransactionRoots};
use crate::write_set::{Fingerprint, Precondition};

impl BranchLayers<'_> {
    /// Whether a path of the base was free at the fork, as far as our own transactions may have filled it since.
    pub(super) fn was_missing_at_fork(&self, path: &Path) -> Result<bool, Error> {
        for snapshot_layer in &self.request.snapshot_layers {
            let place = Location::Store(snapshot_layer.join(path));
            if let Some(stat) = self.disk.stat(&place)? {
                return self.is_whiteout(&place, &stat);
            }
        }
        Ok(false)
    }

    /// Refuses a device 0:0 in the base: the kernel takes it for a whiteout, so the branch has not seen it.
    pub(super) fn refuse_unseen_device(&self, path: &Path, stat: &Statx) -> Result<(), Error> {
        if !(self.request.by_kernel && may_be_whiteout(stat)) {
            return Ok(());
        }
        let path = path.display();
        Err(Error::Unsupported(format!(
            "{path} is a device 0:0 in the base, which the overlay driver cannot show in a branch, and the commit would take it away; the branch is still open: commit with --exclude /{path}, or move the device out of the base"
        )))
    }

    /// An object of the base may bear attributes that overlay file systems reserve for themselves. A branch does not see
    /// them, so that its copy of the object is without them.
    pub(super) fn refuse_unseen_attributes(
        &self,
        path: &Path,
        place: &Location,
    ) -> Result<(), Error> {
        let Location::Base(_) = place else { return Ok(()) };
        let marks = self.disk.private_xattrs(place)?;
        let Some((name, _)) = marks.first() else { return Ok(()) };
        let (path, name) = (path.display(), name.to_string_lossy());
        Err(Error::Unsupported(format!(
            "{path} has the attribute {name} in the base, which belongs to another overlay file system and which a branch cannot carry: the commit would drop it; the branch is still open: commit with --exclude /{path}, or remove the attribute first (setfattr -x {name})"
        )))
    }

    /// Whether an object last changed at `ctime` is as it was at the fork, except for our own changes.
    pub(super) fn is_of_the_fork(&self, ctime: i64) -> bool {
        ctime <= self.request.forked || self.request.own_changes.contains(ctime, i64::MIN)
    }
}

impl Planner<'_> {
    /// Compares the object at a location of the base with the branch's precondition.
    pub(super) fn check(
        &mut self,
        existing: &Location,
        found: Option<&Statx>,
    ) -> Result<(), Error> {
        let Location::Base(path) = existing else {
            return Ok(());
        };
        match found {
            Some(stat) => self.check_present(path, stat)?,
            None => {
                if matches!(self.request.preconditions.get(path), Some(Precondition::Present(_)))
                    && !self.moved.contains_key(path)
                {
                    self.plan.drift.insert(path.clone());
                }
            }
        }
        Ok(())
    }

    pub(super) fn check_present(&mut self, path: &Path, stat: &Statx) -> Result<(), Error> {
        refuse_mount_point(path, stat)?;
        self.layers.refuse_unseen_device(path, stat)?;
        let found = Fingerprint::of(stat);
        let own_changes = &self.request.own_changes;
        let is_as_known = |ctime: i64| {
            let now = Fingerprint { ctime, ..found };
            let is_ours = own_changes.contains(ctime, i64::MIN);
            match self.request.preconditions.get(path) {
                Some(Precondition::Present(then)) => {
                    // A commit and its undo leave an object as it was but for its ctime.
                    let then = if is_ours { Fingerprint { ctime, ..*then } } else { *then };
                    then.matches(&now)
                }
                Some(Precondition::Absent) => false,
                // No precondition: a directory's times change with its entries, which are compared on their own.
                None => now.is_directory() || self.layers.is_of_the_fork(ctime),
            }
        };
        if !own_changes.equivalent_ctimes(found.ino, found.ctime).any(is_as_known) {
            self.plan.drift.insert(path.to_path_buf());
        }
        Ok(())
    }

    /// A directory without a precondition, removed together with its parent. Others may have moved it there since the
    /// fork, with older files in it: its own ctime shows that.
    pub(super) fn check_unseen_directory(&mut self, path: &Path, stat: &Statx) {
        let found = Fingerprint::of(stat);
        let mut ctimes = self.request.own_changes.equivalent_ctimes(found.ino, found.ctime);
        let is_seen = self.request.preconditions.contains_key(path);
        if !is_seen && !ctimes.any(|ctime| self.layers.is_of_the_fork(ctime)) {
            self.plan.drift.insert(path.to_path_buf());
        }
    }
}

/// Refuses a mount point: the branch shows the directory below the mount, and nothing can be moved there.
pub(super) fn refuse_mount_point(path: &Path, stat: &Statx) -> Result<(), Error> {
    if !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(());
    }
    let path = path.display();
    Err(Error::Unsupported(format!(
        "another file system or directory is mounted on {path} in the base: the branch has what lies under it, and no commit reaches that; the branch is still open: commit with --exclude /{path}, which leaves it as it is, or unmount it first"
    )))
}

/// Refuses a case-insensitive directory (`chattr +F`): two names of the branch could be one in the base.
pub(super) fn refuse_folding(disk: &TransactionRoots, existing: &Location) -> Result<(), Error> {
    const CASEFOLD: u32 = 0x4000_0000; // FS_CASEFOLD_FL, linux/fs.h
    let Location::Base(path) = existing else { return Ok(()) };
    let opened = disk.base.open(path, OFlags::RDONLY | OFlags::DIRECTORY).at(path)?;
    match rustix::fs::ioctl_getflags(&opened) {
        Ok(flags) if flags.bits() & CASEFOLD != 0 => Err(Error::Unsupported(format!(
            "{} does not distinguish upper and lower case (chattr +F), and the branch has changed \
                what is in it: commit with --exclude, which leaves it as it is",
            path.display()
        ))),
        _ => Ok(()), // without such flags no directory is so by itself
    }
}

/// Refuses an immutable object in a removed directory: the directory could not be deleted later.
pub(super) fn refuse_immutable(path: &Path, stat: &Statx) -> Result<(), Error> {
    if stat.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND) {
        return Err(rustix::io::Errno::PERM).at(path);
    }
    Ok(())
}
