//! Whether the base is what the branch saw of it (S8), and can take what the branch did.

use std::path::Path;

use rustix::fs::{OFlags, Statx, StatxAttributes};

use super::Planner;
use crate::error::{Context, Error};
use crate::overlay::may_be_whiteout;
use crate::transaction::step::{Location, TransactionRoots};
use crate::write_set::{Fingerprint, Precondition};

impl Planner<'_> {
    /// Whether a path of the base was free at the fork, as far as our own transactions may have filled it since.
    pub(super) fn was_missing_at_fork(&self, path: &Path) -> Result<bool, Error> {
        for veil in &self.request.veils {
            let place = Location::Store(veil.join(path));
            if let Some(stat) = self.disk.stat(&place)? {
                return self.is_whiteout(&place, &stat);
            }
        }
        Ok(false)
    }

    /// Compares what the base has at a place with what the branch saw there.
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
                if matches!(self.request.seen.get(path), Some(Precondition::Present(_)))
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
        self.refuse_unseen_device(path, stat)?;
        let found = Fingerprint::of(stat);
        let traces = &self.request.traces;
        let is_as_known = |ctime: i64| {
            let now = Fingerprint { ctime, ..found };
            let is_ours = traces.covers(ctime, i64::MIN);
            match self.request.seen.get(path) {
                Some(Precondition::Present(then)) => {
                    // A commit and its undo leave an object as it was but for its ctime.
                    let then = if is_ours { Fingerprint { ctime, ..*then } } else { *then };
                    then.still(&now)
                }
                Some(Precondition::Absent) => false,
                // Never noted: a directory's times change with its entries, which are compared by themselves.
                None => now.is_directory() || self.is_of_the_fork(ctime),
            }
        };
        if !traces.same(found.ino, found.ctime).any(is_as_known) {
            self.plan.drift.insert(path.to_path_buf());
        }
        Ok(())
    }

    /// A directory that goes with one which the branch removed, and that it never noted. Others may have moved it there since
    /// the fork, with files in it that are older: its own ctime tells.
    pub(super) fn check_unseen_directory(&mut self, path: &Path, stat: &Statx) {
        let found = Fingerprint::of(stat);
        let mut ctimes = self.request.traces.same(found.ino, found.ctime);
        let is_seen = self.request.seen.contains_key(path);
        if !is_seen && !ctimes.any(|ctime| self.is_of_the_fork(ctime)) {
            self.plan.drift.insert(path.to_path_buf());
        }
    }

    /// The kernel takes a device 0:0 of the base for a whiteout: nobody in the branch has seen it.
    fn refuse_unseen_device(&self, path: &Path, stat: &Statx) -> Result<(), Error> {
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
        let marks = self.disk.marks(place)?;
        let Some((name, _)) = marks.first() else { return Ok(()) };
        let (path, name) = (path.display(), name.to_string_lossy());
        Err(Error::Unsupported(format!(
            "{path} has the attribute {name} in the base, which belongs to another overlay file system and which a branch cannot carry: the commit would drop it; the branch is still open: commit with --exclude /{path}, or remove the attribute first (setfattr -x {name})"
        )))
    }

    /// Whether what was last changed at `ctime` is as it was at the fork, but for what our own work did to it.
    fn is_of_the_fork(&self, ctime: i64) -> bool {
        ctime <= self.request.forked || self.request.traces.covers(ctime, i64::MIN)
    }
}

/// A branch has what lies under a mount, and nothing can be moved there.
pub(super) fn refuse_mount_point(path: &Path, stat: &Statx) -> Result<(), Error> {
    if !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(());
    }
    let path = path.display();
    Err(Error::Unsupported(format!(
        "another file system or directory is mounted on {path} in the base: the branch has what lies under it, and no commit reaches that; the branch is still open: commit with --exclude /{path}, which leaves it as it is, or unmount it first"
    )))
}

/// Where upper and lower case are one (`chattr +F`), two names of the branch could be one in the base.
pub(super) fn refuse_folding(disk: &TransactionRoots, existing: &Location) -> Result<(), Error> {
    const CASEFOLD: u32 = 0x4000_0000; // FS_CASEFOLD_FL, linux/fs.h
    let Location::Base(path) = existing else { return Ok(()) };
    let opened = disk.base.open(path, OFlags::RDONLY | OFlags::DIRECTORY).at(path)?;
    match rustix::fs::ioctl_getflags(&opened) {
        Ok(flags) if flags.bits() & CASEFOLD != 0 => Err(Error::Unsupported(format!(
            "{} does not tell upper from lower case (chattr +F), and the branch has changed what is in it: commit with --exclude, which leaves it as it is",
            path.display()
        ))),
        _ => Ok(()), // without such flags no directory is so by itself
    }
}

/// What `rm -r` would leave standing is not taken away with the directory around it: nobody could delete it later.
pub(super) fn refuse_immutable(path: &Path, stat: &Statx) -> Result<(), Error> {
    if stat.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND) {
        return Err(rustix::io::Errno::PERM).at(path);
    }
    Ok(())
}
