//! Names that move.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, RenameFlags};
use rustix::io::Errno;

use super::remove::{counted, counting_less};
use super::{UpperEntry, upper_entry};
use crate::layer::{Layer, WorkEntry};
use crate::overlay::Redirect;
use crate::rooted_dir::Result;
use crate::view::CopyData;
use crate::view::listing::is_store;
use crate::view::{NodeIndex, NodeLocation, View, quota_hooks};

impl View {
    /// Renames as `renameat2` does.
    pub fn rename(
        &mut self,
        from: (NodeIndex, &OsStr),
        to: (NodeIndex, &OsStr),
        flags: RenameFlags,
    ) -> Result<()> {
        if is_store(from.0, from.1) || is_store(to.0, to.1) {
            return Err(Errno::PERM);
        }
        let (source, _) = self.tree.lookup(from.0, from.1)?.ok_or(Errno::NOENT)?;
        let target = self.tree.lookup(to.0, to.1)?;
        if flags.contains(RenameFlags::EXCHANGE) {
            let (target, _) = target.ok_or(Errno::NOENT)?;
            return self.exchange(from, source, to, target);
        }
        if let Some((target, _)) = target {
            if flags.contains(RenameFlags::NOREPLACE) {
                return Err(Errno::EXIST);
            }
            if target == source {
                return Ok(()); // two names of one object: rename(2) does nothing
            }
            self.may_replace(source, target)?;
        }
        let (top, new) = (self.tree.top(), self.new_path(to.0, to.1)?);
        self.tree.copy_up(source, CopyData::Yes)?;
        self.tree.copy_up(to.0, CopyData::Yes)?;
        self.tree.copy_up(from.0, CopyData::Yes)?;
        let old = self.tree.nodes.path(from.0)?.join(from.1);
        let below_old = self.tree.find_below(from.0, from.1)?.is_some();
        let below_new = self.tree.find_below(to.0, to.1)?;
        self.tree.record_present(from.0, from.1)?;
        self.tree.record_present(to.0, to.1)?;
        self.mark_moved(source, &top, &old, below_new.is_some())?;
        let leaving = quota_hooks::pending_removal(&top, &new)?;
        let kind = self.tree.nodes.get(source)?.kind;
        let counted = counted(&top, &new, below_new.as_ref())?;
        counting_less(&top, counted, || move_entry(&top, &old, &new, kind, below_old))?;
        quota_hooks::left(&top, leaving.as_ref());
        if let Some((_, attributes)) = target {
            self.tree.nodes.orphan(to.0, to.1, Some(attributes));
        }
        self.tree.nodes.unname(from.0, from.1);
        self.tree.nodes.name(source, to.0, to.1);
        Ok(())
    }

    fn may_replace(&self, source: NodeIndex, target: NodeIndex) -> Result<()> {
        let kinds = (self.tree.nodes.get(source)?.kind, self.tree.nodes.get(target)?.kind);
        match (kinds.0 == FileType::Directory, kinds.1 == FileType::Directory) {
            (true, false) => Err(Errno::NOTDIR),
            (false, true) => Err(Errno::ISDIR),
            (true, true) if !self.tree.is_empty(target)? => Err(Errno::NOTEMPTY),
            _ => Ok(()),
        }
    }

    /// Sets a redirect on a renamed directory so that it still merges with the same lower directory, and marks it
    /// opaque against the one at its new path.
    fn mark_moved(
        &mut self,
        index: NodeIndex,
        top: &Layer,
        path: &Path,
        onto_something: bool,
    ) -> Result<()> {
        let origin = match &self.tree.nodes.get(index)?.place {
            NodeLocation::Directory { lowers, .. } if lowers.is_empty() => None,
            NodeLocation::Directory { .. } => Some(path_below(top, path)?),
            _ => return Ok(()),
        };
        match origin {
            Some(origin) => top.set_redirect(path, &origin),
            None if onto_something => top.set_opaque(path),
            None => Ok(()),
        }
    }

    fn exchange(
        &mut self,
        one: (NodeIndex, &OsStr),
        first: NodeIndex,
        other: (NodeIndex, &OsStr),
        second: NodeIndex,
    ) -> Result<()> {
        if first == second {
            return Ok(());
        }
        let (old, new) = (self.new_path(one.0, one.1)?, self.new_path(other.0, other.1)?);
        for index in [first, second, one.0, other.0] {
            self.tree.copy_up(index, CopyData::Yes)?;
        }
        let top = self.tree.top();
        self.tree.record_present(one.0, one.1)?;
        self.tree.record_present(other.0, other.1)?;
        if !top.is_base() {
            let below_new = self.tree.find_below(other.0, other.1)?.is_some();
            let below_old = self.tree.find_below(one.0, one.1)?.is_some();
            self.mark_moved(first, &top, &old, below_new)?;
            self.mark_moved(second, &top, &new, below_old)?;
        }
        top.tree.invalidate(&old);
        top.tree.invalidate(&new);
        top.tree.rename(&old, &new, RenameFlags::EXCHANGE)?;
        self.tree.nodes.exchange(one, other);
        Ok(())
    }
}

/// Moves an entry of the top layer; with `whiteout` it leaves one.
fn move_entry(top: &Layer, old: &Path, new: &Path, kind: FileType, whiteout: bool) -> Result<()> {
    let is_directory = kind == FileType::Directory;
    if is_directory {
        top.tree.invalidate(old);
        top.tree.invalidate(new);
    }
    if is_directory && !top.is_base() && upper_entry(top, new)? != UpperEntry::Nothing {
        // A directory cannot be renamed over a whiteout or over a directory that holds whiteouts.
        top.tree.rename(old, new, RenameFlags::EXCHANGE)?;
        let replaced = if whiteout {
            top.put_whiteout(old)
        } else {
            let scratch = WorkEntry::new(top); // removes what comes there
            top.rename_out_of_upper(old, &scratch)
        };
        return replaced.inspect_err(|_| {
            // Where this fails too, the names stay exchanged; the first error is the one to report.
            let _ = top.tree.rename(old, new, RenameFlags::EXCHANGE);
        });
    }
    if !whiteout {
        return top.tree.rename(old, new, RenameFlags::empty());
    }
    match top.tree.rename(old, new, RenameFlags::WHITEOUT) {
        Err(Errno::INVAL | Errno::PERM) => {
            top.tree.rename(old, new, RenameFlags::empty())?;
            top.put_whiteout(old)
        }
        other => other,
    }
}

/// The path under which the merged layers below the top one show the object at `path` of the top layer. It may differ
/// from the path in the lower layer: a layer in between may have moved a parent directory.
fn path_below(top: &Layer, path: &Path) -> Result<PathBuf> {
    let (mut place, mut names) = (PathBuf::new(), Vec::new());
    for ancestor in path.ancestors() {
        let Some(name) = ancestor.file_name() else { break };
        match top.redirect(ancestor)? {
            Some(Redirect::Path(origin)) => {
                place = origin;
                break;
            }
            Some(Redirect::Sibling(name)) => names.push(name),
            None => names.push(name.to_owned()),
        }
    }
    place.extend(names.iter().rev());
    Ok(place)
}
