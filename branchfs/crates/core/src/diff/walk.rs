//! Pairing what a branch has with what its parent has, by names alone.
//!
//! In a directory that shows its parent's through, only the names of the branch's own layers can differ. A directory that
//! shows another of the parent's directories through was renamed: its content is compared with that one's. What lies
//! below a renamed directory and was not touched is left out ([`RenamedDirs::Collapse`]) or listed name by name
//! ([`RenamedDirs::Expand`]), for formats that cannot rename a directory.
//!
//! A name that is gone may be the old name of a renamed directory: the redirects of the own layers are collected first.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::stack::{Directory, Entry, Stack};
use super::{Pair, Side};
use crate::error::Error;
use crate::layer::Layer;

/// How names below a renamed directory are reported.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenamedDirs {
    /// The directory stands for them.
    Collapse,
    /// Each is listed.
    Expand,
}

/// The objects that [`walk`] found, on both sides.
#[derive(Debug, Default)]
pub struct Walked {
    /// Sorted by path; the root is first.
    pub(crate) pairs: Vec<Pair>,
    /// Paths at which the own layers hide everything that may appear below them: names that they created and removed
    /// again, and directories that they removed and created again. In the present view below, nothing need differ
    /// there.
    pub(crate) opaque_paths: BTreeSet<PathBuf>,
}

/// Pairs everything that the `own` layers have with the same of the view `below` them.
///
/// The layers must stand still meanwhile.
pub fn walk(own: &[Arc<Layer>], below: &[Arc<Layer>], moves: RenamedDirs) -> Result<Walked, Error> {
    let old = Stack::new(below, &[]);
    let new = Stack::new(own, below);
    let (before, after) = (old.root(), new.root());
    let mut moved = HashSet::new();
    find_moved(&new, after.clone(), &mut moved)?;
    let (was, is) = (old.side(&before)?, new.side(&after)?);
    let root = Pair { before: Some(was), after: Some(is), keeps_name: true };
    let found = Walked { pairs: vec![root], opaque_paths: BTreeSet::new() };
    let pending = vec![(after, Some(before))];
    let mut walk = Walk { old, new, moves, found, moved, pending };
    while let Some((after, before)) = walk.pending.pop() {
        walk.directory(&after, before.as_ref())?;
    }
    let mut found = walk.found;
    found.pairs.sort_by(|one, other| one.path().cmp(other.path()));
    Ok(found)
}

/// Pairs everything in the view of `layers` with nothing.
///
/// The layers must not change meanwhile.
pub fn list_view(layers: &[Arc<Layer>]) -> Result<Vec<Pair>, Error> {
    let view = Stack::new(layers, &[]);
    let mut pairs = Vec::new();
    let mut pending = vec![view.root()];
    let mut list = |side| pairs.push(Pair { before: None, after: Some(side), keeps_name: false });
    while let Some(directory) = pending.pop() {
        list(view.side(&directory)?);
        for name in view.all_names(&directory)? {
            match view.find(&directory, &name)? {
                Some(Entry::Directory(below)) => pending.push(below),
                Some(Entry::Upper(object) | Entry::Lower(object)) => list(object),
                None => {}
            }
        }
    }
    Ok(pairs)
}

/// Collects the directories of the parent that the branch has under another name.
fn find_moved(new: &Stack, root: Directory, moved: &mut HashSet<PathBuf>) -> Result<(), Error> {
    let mut pending = vec![root];
    while let Some(directory) = pending.pop() {
        for name in new.own_names(&directory)? {
            let Some(Entry::Directory(found)) = new.find(&directory, &name)? else { continue };
            let in_place = directory.origin().map(|origin| origin.join(&name));
            match found.origin() {
                Some(origin) if in_place.as_deref() != Some(origin) => {
                    moved.insert(origin.to_path_buf());
                }
                _ => {}
            }
            pending.push(found);
        }
    }
    Ok(())
}

impl Pair {
    /// The present path; for a removed object its path before.
    pub fn path(&self) -> &Path {
        let side = self.after.as_ref().or(self.before.as_ref());
        &side.expect("a pair has at least one side").path
    }
}

struct Walk {
    old: Stack,
    new: Stack,
    moves: RenamedDirs,
    found: Walked,
    /// Directories of the parent that are under another name.
    moved: HashSet<PathBuf>,
    /// Directories that are left to compare, each with its counterpart.
    pending: Vec<(Directory, Option<Directory>)>,
}

impl Walk {
    /// Compares the content of a directory with that of its counterpart.
    fn directory(&mut self, after: &Directory, before: Option<&Directory>) -> Result<(), Error> {
        let shows = match before {
            Some(before) => after.origin() == Some(before.path.as_path()),
            None => after.origin().is_none(),
        };
        let was_moved = before.is_some_and(|before| before.path != after.path);
        let mut names: BTreeSet<OsString> = self.new.own_names(after)?;
        if !shows || (was_moved && self.moves == RenamedDirs::Expand) {
            names.extend(self.new.all_names(after)?);
            if let Some(before) = before {
                names.extend(self.old.all_names(before)?);
            }
        }
        for name in names {
            let found = self.new.find(after, &name)?;
            let known = match before {
                Some(before) => self.old.find(before, &name)?,
                None => None,
            };
            self.name(&after.path.join(&name), found, known)?;
        }
        Ok(())
    }

    fn name(
        &mut self,
        path: &Path,
        found: Option<Entry>,
        known: Option<Entry>,
    ) -> Result<(), Error> {
        match (found, known) {
            (Some(Entry::Directory(after)), known) => self.present_directory(&after, known),
            (Some(Entry::Upper(after)), Some(Entry::Upper(before) | Entry::Lower(before))) => {
                self.pair(Some(before), Some(after));
                Ok(())
            }
            (Some(Entry::Upper(after)), known) => {
                self.pair(None, Some(after));
                self.lost(known)
            }
            // What shows through is unchanged: of interest only below a directory that was renamed.
            (Some(Entry::Lower(object)), _) => {
                if object.path != path && self.moves == RenamedDirs::Expand {
                    let after = Side { path: path.to_path_buf(), ..object.clone() };
                    self.pair(Some(object), Some(after));
                }
                Ok(())
            }
            (None, None) => {
                self.found.opaque_paths.insert(path.to_path_buf());
                Ok(())
            }
            (None, known) => self.lost(known),
        }
    }

    fn present_directory(&mut self, after: &Directory, known: Option<Entry>) -> Result<(), Error> {
        let before = match known {
            Some(Entry::Directory(before)) if !self.moved.contains(&before.path) => Some(before),
            Some(Entry::Directory(_)) => None,
            known => {
                self.lost(known)?;
                None
            }
        };
        let expected = before.as_ref().map(|before| before.path.clone());
        // What shows through is the counterpart; where nothing does, the directory of the same name.
        let counterpart = match after.below() {
            Some(origin) => {
                if let Some(replaced) = before.filter(|before| before.path != origin.path) {
                    self.removed(&replaced)?;
                }
                Some(origin)
            }
            None => {
                if before.is_some() {
                    self.found.opaque_paths.insert(after.path.clone());
                }
                before
            }
        };
        let was_moved =
            counterpart.as_ref().is_some_and(|counterpart| counterpart.path != after.path);
        if after.is_untouched() && !(was_moved && self.moves == RenamedDirs::Expand) {
            return Ok(());
        }
        let now = self.new.side(after)?;
        let was = match &counterpart {
            Some(counterpart) => Some(self.old.side(counterpart)?),
            None => None,
        };
        let keeps_name = counterpart
            .as_ref()
            .is_some_and(|counterpart| Some(counterpart.path.as_path()) == expected.as_deref());
        self.found.pairs.push(Pair { before: was, after: Some(now), keeps_name });
        self.pending.push((after.clone(), counterpart));
        Ok(())
    }

    fn pair(&mut self, before: Option<Side>, after: Option<Side>) {
        // Listed one by one, what is below a renamed directory is renamed itself.
        let keeps_name = self.moves == RenamedDirs::Collapse && before.is_some() && after.is_some();
        self.found.pairs.push(Pair { before, after, keeps_name });
    }

    /// Reports a name of the parent that was removed or replaced.
    fn lost(&mut self, known: Option<Entry>) -> Result<(), Error> {
        match known {
            Some(Entry::Directory(directory)) => self.removed(&directory),
            Some(Entry::Upper(object) | Entry::Lower(object)) => {
                self.pair(Some(object), None);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Reports a removed directory, with everything that was in it.
    fn removed(&mut self, directory: &Directory) -> Result<(), Error> {
        let mut pending = vec![directory.clone()];
        while let Some(directory) = pending.pop() {
            if self.moved.contains(&directory.path) {
                continue;
            }
            let side = self.old.side(&directory)?;
            self.pair(Some(side), None);
            for name in self.old.all_names(&directory)? {
                match self.old.find(&directory, &name)? {
                    Some(Entry::Directory(below)) => pending.push(below),
                    Some(Entry::Upper(object) | Entry::Lower(object)) => {
                        self.pair(Some(object), None);
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }
}
